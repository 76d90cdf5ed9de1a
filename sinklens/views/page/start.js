// Draws the first view, then everything that can wait.

async function start() {
  await openReport();
  fillHeader();
  listenControls();
  fillControls();
  listenTokens();
  fillTokens();
  listenFigures();
  await choose(...info.start);
  requestAnimationFrame(() => setTimeout(() => performance.mark("first-view"), 0));
  listenAttention();
  if (byId("end")) startAttention();
  else document.addEventListener("DOMContentLoaded", startAttention);
}

start().catch(fail);
