// Draws CircuitsVis's AttentionHeads, from numbers in this document or from those that the parent page sends.

const COLORS = { positiveColor: RAMPS.diverging[1], negativeColor: RAMPS.diverging.at(-2) };

function drawHeads(props, note) {
  byId("note").textContent = note || "";
  const wanted = props.attention.length + 1; // a small map per head, and the large one
  CircuitsVis.render("heads", CircuitsVis.AttentionHeads, { ...props, minValue: -props.maxValue, ...COLORS });
  return new Promise((resolve) => { // in an invisible frame this waits until the frame becomes visible
    const check = () => {
      if (document.querySelectorAll("#heads canvas").length < wanted) setTimeout(check, 20);
      else requestAnimationFrame(() => requestAnimationFrame(resolve));
    };
    check();
  });
}

// Shows head `head` at full size, as if it had been clicked.
function lockHead(head) {
  const map = document.querySelectorAll("#heads canvas")[head];
  if (head !== lockHead.last && map) map.click();
  lockHead.last = head;
}
lockHead.last = 0; // CircuitsVis starts with the first head

function sendHeight() {
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
    sendHeight();
    new ResizeObserver(sendHeight).observe(byId("heads"));
    parent.postMessage({ sinklens: "drawn" }, "*");
    lockHead(data.head);
  });
  parent.postMessage({ sinklens: "ready" }, "*");
}

startHeads().catch((error) => { byId("note").textContent = String(error.message || error); });
