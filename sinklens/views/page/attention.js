// The attention of one step and layer: one head drawn here at full size, all heads drawn by CircuitsVis in a frame.
// The frame is a separate document (heads.html): it draws without blocking this page, and removing it frees
// everything that CircuitsVis created.

const shown = { step: null, layer: null, head: 0, map: null, frame: null, ready: false };
const places = info.attention.places; // [step, layer, side]: side is the number of positions or blocks along an edge
const BLOCK = info.attention.block;
const TOP = 6; // space above the map for its first number

const placeNow = () => places.find(([step, layer]) => step === shown.step && layer === shown.layer);
const weight = (head, query, key) => (shown.map[(head * shown.side + query) * shown.side + key] / 255) ** 2;
const blockText = (at) => (BLOCK === 1 ? [strong(numberOf(at)), " ", quoted(info.vocabulary[data.entered[pageStep() * P + at]])]
  : [strong(`${numberOf(at * BLOCK)}–${numberOf(Math.min(P, (at + 1) * BLOCK) - 1)}`)]);
const pageStep = () => info.steps.indexOf(shown.step);

function fillAttentionChoice() {
  const steps = [...new Set(places.map(([step]) => step))];
  byId("attention-step").append(...steps.map((step) => option(step, step)));
  byId("attention-text").append(` This page holds ${steps.length === 1 ? "step" : "steps"} ${steps.join(", ")}.`);
  byId("attention-head").append(...Array.from({ length: H }, (_, head) => option(head, head)));
  fillLayers();
}

function fillLayers() {
  const has = places.filter(([step]) => step === shown.step).map(([, layer]) => layer).sort((a, b) => a - b);
  byId("attention-layer").replaceChildren(...has.map((layer) => option(layer, layer)));
  if (!has.includes(shown.layer)) shown.layer = has[0];
  byId("attention-layer").value = shown.layer;
}

async function showAttention() {
  fillLayers();
  const [step, layer, side] = placeNow(), asked = `${step}-${layer}`;
  shown.asked = asked;
  const map = new Uint8Array(await readBytes("pattern-" + asked));
  if (has(layer)) await loadLayer(layer);
  if (shown.asked !== asked) return;
  Object.assign(shown, { map, side });
  byId("attention-step").value = step;
  drawPattern();
  drawCircuitsSoon();
}

// ---- one head

function drawPattern() {
  byId("attention-head").value = shown.head;
  const canvas = byId("pattern"), room = Math.min(widthOf(canvas), 560), { side, head } = shown;
  shown.cell = Math.max(side > 400 ? 1 : 1.5, (room - 38) / side);
  shown.cell = Math.min(shown.cell, 30);
  const size = shown.cell * side, brush = sized(canvas, 34 + size + 2, TOP + size + 22);
  remember(canvas, { left: 34, top: TOP, cell: shown.cell, high: shown.cell });
  const row = new Float32Array(side * side);
  let peak = 0;
  for (let at = 0; at < row.length; at++) { row[at] = weight(head, 0, at); peak = Math.max(peak, row[at]); }
  shown.most = peak || 1;
  const cells = image(side, side, (query, key) => (info.causal && key > query ? null : attentionLevel(row[query * side + key] / shown.most)));
  brush.imageSmoothingEnabled = false;
  brush.drawImage(cells, 34, TOP, size, size);
  brush.strokeStyle = inkOf("line");
  brush.strokeRect(34.5, TOP + 0.5, size - 1, size - 1);
  brush.textAlign = "right";
  const from = BLOCK === 1 ? info.first : 0;
  for (const at of ticks(side, size, 22, from)) brush.fillText(numberOf(at * BLOCK), 27, TOP + (at + 0.5) * shown.cell + 4);
  brush.textAlign = "center";
  for (const at of ticks(side, size, 34, from)) brush.fillText(numberOf(at * BLOCK), 34 + (at + 0.5) * shown.cell, TOP + size + 15);
  canvas.setAttribute("aria-label", `Attention of step ${shown.step}, layer ${shown.layer}, head ${head}: queries down, keys across`);
  listKeys();
}

function pointPattern(event) {
  const [x, y] = placeIn(event), { side, cell, head } = shown;
  if (!side) return;
  const query = clamp(Math.floor((y - TOP) / cell), 0, side - 1), key = clamp(Math.floor((x - 34) / cell), 0, side - 1);
  const value = weight(head, query, key);
  write(byId("pattern-readout"), "query ", ...blockText(query), " gives key ", ...blockText(key), " ", strong(value < 0.001 && value > 0 ? "under 0.001" : value.toFixed(3)), BLOCK > 1 ? ` at most (${BLOCK} × ${BLOCK} positions)` : "");
}

function listKeys() {
  const step = pageStep(), { layer, head } = shown, list = byId("keys");
  if (!has(layer)) return write(list, make("li", "This page does not hold the scores of this layer."));
  const order = Array.from({ length: P }, (_, at) => at).filter((at) => exists(step, at)).sort((a, b) => scoreAt(step, b, layer, head) - scoreAt(step, a, layer, head));
  const most = scoreAt(step, order[0], layer, head) || 1;
  write(list, ...order.slice(0, 12).map((at) => {
    const score = scoreAt(step, at, layer, head), item = make("li"), bar = make("span", undefined, "bar-of"), fill = make("i");
    fill.style.width = `${(100 * score) / most}%`;
    bar.append(fill, make("bdi", info.vocabulary[data.entered[step * P + at]]));
    item.append(make("span", numberOf(at), "at"), bar, make("span", short(score), "value"));
    item.classList.toggle("is-sink", Boolean(isSink(step, at, layer, head)));
    return item;
  }));
}

// Index of the chosen head among the heads in the frame.
const headInFrame = () => (byId("circuits-heads").value === "one" ? 0 : shown.head);

function showHead(head) {
  shown.head = head;
  drawPattern();
  if (byId("circuits-heads").value === "one") drawCircuitsSoon();
  else if (shown.frame) shown.frame.contentWindow.postMessage({ head }, "*");
}

// Choosing a head above also selects its attention, if the page holds it.
function followHead() {
  if (!shown.ready || view.layer === ALL) return;
  const head = view.head === ALL ? shown.head : view.head;
  const known = places.some(([step, layer]) => step === shown.step && layer === view.layer);
  if (!known || (head === shown.head && view.layer === shown.layer)) return drawPattern();
  if (view.layer === shown.layer) return showHead(head);
  Object.assign(shown, { head, layer: view.layer });
  return showAttention();
}

// ---- all heads, by CircuitsVis

// At most `info.attention.cells` cells: neighbouring positions are merged into blocks that show their largest value.
function forCircuits() {
  const heads = byId("circuits-heads").value === "one" ? [shown.head] : Array.from({ length: H }, (_, head) => head);
  const { side } = shown, most = Math.max(1, Math.floor(Math.sqrt(info.attention.cells / heads.length))), block = Math.ceil(side / most);
  const edge = Math.ceil(side / block), step = pageStep();
  let peak = 0;
  const attention = heads.map((head) => Array.from({ length: edge }, (_, q) => Array.from({ length: edge }, (_, k) => {
    let value = 0;
    for (let query = q * block; query < Math.min(side, (q + 1) * block); query++)
      for (let key = k * block; key < Math.min(side, (k + 1) * block); key++) value = Math.max(value, shown.map[(head * side + query) * side + key]);
    value = Math.round((value / 255) ** 2 * 1e4) / 1e4;
    peak = Math.max(peak, value);
    return value;
  })));
  const wide = block * BLOCK, end = Math.min(P, side * BLOCK);
  const tokens = Array.from({ length: edge }, (_, at) => (wide === 1 ? info.vocabulary[data.entered[step * P + at]]
    : `${numberOf(at * wide)}–${numberOf(Math.min(end, (at + 1) * wide) - 1)}`));
  const props = { attention, tokens, attentionHeadNames: heads.map((head) => `Head ${head}`), maskUpperTri: info.causal, maxValue: peak || 1 };
  return { props, wide };
}

function drawCircuitsSoon() {
  if (!shown.map) return;
  clearTimeout(shown.timer);
  byId("circuits").classList.add("busy");
  if (shown.near) shown.timer = setTimeout(() => drawCircuits().catch(fail), 60);
}

async function drawCircuits() {
  shown.script ??= await readText("circuitsvis");
  const { props, wide } = forCircuits(), frame = document.createElement("iframe");
  const old = shown.frame, label = `Attention heads of step ${shown.step}, layer ${shown.layer}`;
  byId("circuits").querySelectorAll("iframe.coming").forEach((other) => other.remove());
  frame.className = "coming";
  frame.title = label;
  frame.setAttribute("sandbox", "allow-scripts");
  frame.srcdoc = info.frame;
  const began = performance.now();
  shown.talk = ({ data: message, source }) => {
    if (source !== frame.contentWindow || !message) return;
    if (message.sinklens === "ready") source.postMessage({ script: shown.script, props, head: headInFrame() }, "*");
    if (message.sinklens === "height") frame.style.height = `${Math.min(4000, message.height)}px`;
    if (message.sinklens !== "drawn") return;
    frame.className = "";
    if (old) old.remove();
    shown.frame = frame;
    byId("circuits").classList.remove("busy");
    byId("circuits").dataset.shown = `${shown.step}/${shown.layer}/${byId("circuits-heads").value}`;
    performance.measure("circuitsvis", { start: began, end: performance.now() });
    byId("circuits-note").textContent = `Step ${shown.step}, layer ${shown.layer}; darkest is ${props.maxValue.toPrecision(2)}.`
      + (wide === 1 && info.first ? ` CircuitsVis counts positions from the first token, which is position ${info.first} here.` : "")
      + (wide > 1 ? ` Each cell covers ${wide} × ${wide} positions and shows the largest value, since CircuitsVis is slow with many cells.` : "");
  };
  byId("circuits-note").textContent = "Drawing…";
  byId("circuits").append(frame);
}

function startAttention() {
  if (!places.length) {
    byId("attention").querySelectorAll("#attention-choice, .pair, .circuits").forEach((part) => { part.hidden = true; });
    byId("attention-text").textContent = info.attention.why;
    return;
  }
  const best = places.filter(([, layer]) => layer === view.layer);
  const [step, layer] = best[Math.floor(best.length / 2)] || places[0];
  Object.assign(shown, { step, layer, head: Math.max(0, view.head) });
  fillAttentionChoice();
  const again = (part) => (event) => { shown[part] = Number(event.target.value); showAttention(); };
  byId("attention-step").addEventListener("change", again("step"));
  byId("attention-layer").addEventListener("change", again("layer"));
  byId("attention-head").addEventListener("change", (event) => showHead(Number(event.target.value)));
  byId("circuits-heads").addEventListener("change", drawCircuitsSoon);
  for (const kind of ["pointermove", "pointerdown"]) byId("pattern").addEventListener(kind, pointPattern);
  addEventListener("message", (event) => shown.talk && shown.talk(event));
  const begin = () => {
    shown.ready = true;
    showAttention().then(() => performance.mark("attention")).catch(fail);
    new IntersectionObserver((entries, watcher) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      shown.near = true;
      drawCircuitsSoon();
    }, { rootMargin: "300px" }).observe(byId("circuits"));
  };
  if (byId("end")) begin();
  else document.addEventListener("DOMContentLoaded", begin);
}
