// Draws CircuitsVis's AttentionHeads, either from numbers in this document or from those a page around it sends.

const COLORS = { positiveColor: "#123f73", negativeColor: "#d94801" };

function drawHeads(props, note) {
  byId("note").textContent = note || "";
  const wanted = props.attention.length + 1; // a small map for each head, and the large one
  CircuitsVis.render("heads", CircuitsVis.AttentionHeads, { ...props, minValue: -props.maxValue, ...COLORS });
  return new Promise((resolve) => { // in a frame that is out of sight this waits until it is seen
    const look = () => {
      if (document.querySelectorAll("#heads canvas").length < wanted) setTimeout(look, 20);
      else requestAnimationFrame(() => requestAnimationFrame(resolve));
    };
    look();
  });
}

// As if head number `head` had been clicked: it is shown large.
function lockHead(head) {
  const map = document.querySelectorAll("#heads canvas")[head];
  if (head !== lockHead.last && map) map.click();
  lockHead.last = head;
}
lockHead.last = 0; // CircuitsVis begins with the first

function tellHeight() {
  const height = Math.ceil(document.documentElement.getBoundingClientRect().height);
  parent.postMessage({ sinklens: "height", height }, "*");
}

async function startHeads() {
  if (byId("props")) {
    const { props, note } = readJson("props");
    runScript(await readText("circuitsvis"));
    await drawHeads(props, note);
    document.body.dataset.drawn = "1";
    return;
  }
  addEventListener("message", async ({ data, source }) => {
    if (source !== parent) return;
    if (document.body.dataset.drawn) return lockHead(data.head);
    document.body.dataset.drawn = "0";
    runScript(data.script);
    await drawHeads(data.props, "");
    document.body.dataset.drawn = "1";
    tellHeight();
    new ResizeObserver(tellHeight).observe(byId("heads"));
    parent.postMessage({ sinklens: "drawn" }, "*");
    lockHead(data.head);
  });
  parent.postMessage({ sinklens: "ready" }, "*");
}

startHeads().catch((error) => { byId("note").textContent = String(error.message || error); });
