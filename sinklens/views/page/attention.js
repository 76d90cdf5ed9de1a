// The attention of one step and layer: one head drawn here at full size, all heads drawn by CircuitsVis in a frame.
// The frame is a separate document (heads.html): it draws without blocking this page, and removing it frees
// everything that CircuitsVis created.

//
// A run offers its attention as `run.attention`: `places` (a list of [step, layer]; null: every one), `read(step, layer)`
// (a map, [head, query, key], of `side` positions or blocks of `block` positions; `value` makes an entry a number),
// `script()` and `load(frame)` for CircuitsVis, and `note` and `why` as text.

const shown = { step: null, layer: null, head: 0, map: null, asked: null, frame: null, ready: false, near: false };
const TOP = 6; // space above the map for its first number

const entry = (head, query, key) => shown.map[(head * shown.side + query) * shown.side + key];
const weight = (head, query, key) => shown.value(entry(head, query, key));
const blockText = (at) => (shown.block === 1 ? [strong(numberOf(at)), " ", quoted(info.vocabulary[data.entered[pageStep() * P + at]])]
  : [strong(`${numberOf(at * shown.block)}–${numberOf(Math.min(P, (at + 1) * shown.block) - 1)}`)]);
const pageStep = () => info.steps.indexOf(shown.step);
const every = (n) => Array.from({ length: n }, (_, at) => at);

function heldSteps() {
  const { places } = run.attention;
  return places ? [...new Set(places.map(([step]) => step))] : info.steps;
}

function heldLayers(step) {
  const { places } = run.attention;
  return places ? places.filter(([held]) => held === step).map(([, layer]) => layer).sort((a, b) => a - b) : every(L);
}

const nearestStep = () => heldSteps().reduce((best, step) => (Math.abs(step - info.steps[view.step]) < Math.abs(best - info.steps[view.step]) ? step : best));

function fillAttention() {
  write(byId("attention-step"), ...heldSteps().map((step) => option(step, step)));
  write(byId("attention-head"), ...every(H).map((head) => option(head, head)));
}

// Says which of the steps that the page holds is shown.
function nameStep() {
  const { places, note } = run.attention, now = info.steps[view.step];
  const nearest = shown.step !== now && shown.step === nearestStep() ? `, the nearest to step ${now}` : "";
  byId("attention-text").textContent = `Queries (rows) attend to keys (columns).${note}${places ? ` Step ${shown.step} is shown${nearest}.` : ""}`;
}

function fillLayers(asked) {
  const held = heldLayers(asked.step);
  write(byId("attention-layer"), ...held.map((layer) => option(layer, layer)));
  if (!held.includes(asked.layer)) asked.layer = held[0];
  for (const part of ["step", "layer", "head"]) byId(`attention-${part}`).value = asked[part];
}

// The step, layer and head of the map shown, or of the one that is being read.
const askedNow = () => shown.asked ?? shown;

// Shows the map of another step, layer or head. The choice takes effect when the map has been read, so that no map is
// drawn under the name of another.
async function showAttention(wish) {
  const { step, layer, head } = askedNow(), asked = (shown.asked = { step, layer, head, ...wish }), of = run;
  fillLayers(asked);
  try {
    const given = await run.attention.read(asked.step, asked.layer);
    if (has(asked.layer)) await of.load(asked.layer);
    if (shown.asked !== asked || of !== run) return;
    Object.assign(shown, given, asked);
  } catch (error) {
    if (shown.asked !== asked || of !== run) return;
    clearAttention(String(error.message || error));
    Object.assign(shown, asked); // a choice of another place is read again
    return;
  } finally {
    if (shown.asked === asked) shown.asked = null;
  }
  hideParts(false);
  byId("attention-why").hidden = true;
  nameStep();
  drawPattern();
  drawCircuitsSoon();
}

const hideParts = (none) => byId("attention").querySelectorAll(".pair, .circuits").forEach((part) => { part.hidden = none; });

// Removes the map, so that it is not taken for that of another run, step or layer; `why` is shown instead.
function clearAttention(why) {
  Object.assign(shown, { map: null, base: null });
  sized(byId("pattern"), 0, 0);
  for (const name of ["keys", "row-keys", "pattern-readout", "circuits-note"]) write(byId(name));
  byId("circuits").replaceChildren();
  byId("circuits").dataset.shown = "";
  clearTimeout(shown.timer);
  Object.assign(shown, { frame: null, talk: null });
  hideParts(true);
  byId("attention-why").textContent = why;
  byId("attention-why").hidden = !why;
}

// ---- one head

function drawPattern() {
  if (!shown.map) return;
  byId("attention-head").value = askedNow().head;
  const canvas = byId("pattern"), room = Math.min(widthOf(canvas), 560), { side, head } = shown;
  shown.cell = Math.max(side > 400 ? 1 : 1.5, (room - LEFT - 4) / side);
  shown.cell = Math.min(shown.cell, 30);
  const size = shown.cell * side;
  shown.brush = sized(canvas, LEFT + size + 2, TOP + size + BOTTOM + 2);
  const [base, brush] = behind(canvas, shown.brush);
  shown.base = base;
  remember(canvas, { left: LEFT, top: TOP, cell: shown.cell, high: shown.cell });
  const row = new Float32Array(side * side);
  let peak = 0;
  for (let at = 0; at < row.length; at++) { row[at] = shown.value(shown.map[head * side * side + at]); if (row[at] > peak) peak = row[at]; }
  shown.most = peak || 1;
  const level = (value) => (Number.isNaN(value) ? null : attentionLevel(value / shown.most)); // NaN: a query that the step did not compute
  const cells = image(side, side, (query, key) => (info.causal && key > query ? null : level(row[query * side + key])));
  brush.imageSmoothingEnabled = false;
  brush.drawImage(cells, LEFT, TOP, size, size);
  brush.strokeStyle = inkOf("line");
  brush.strokeRect(LEFT + 0.5, TOP + 0.5, size - 1, size - 1);
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "right";
  const from = shown.block === 1 ? info.first : 0;
  for (const at of ticks(side, size, 22, from)) brush.fillText(numberOf(at * shown.block), LEFT - 7, TOP + (at + 0.5) * shown.cell + 4);
  brush.textAlign = "center";
  for (const at of ticks(side, size, 34, from)) brush.fillText(numberOf(at * shown.block), LEFT + (at + 0.5) * shown.cell, TOP + size + 15);
  nameAxes(brush, LEFT, TOP, size, size, "key", "query");
  canvas.setAttribute("aria-label", `Attention of step ${shown.step}, layer ${shown.layer}, head ${head}: queries down, keys across`);
  listKeys();
  pointRow();
}

// The position pointed at, as a query: its row in the map, and the keys it attends to most.
function pointRow() {
  const { map, base, brush, cell, side, block, head } = shown, at = view.position;
  if (!map || !base) return;
  blit(brush, base);
  const step = pageStep(), row = at === null || block > 1 || step < 0 || at >= side || !exists(step, at) || Number.isNaN(weight(head, at, 0)) ? null : at;
  byId("row").hidden = row === null;
  if (row === null) return;
  brush.strokeStyle = inkOf("ink");
  brush.strokeRect(LEFT - 0.5, TOP + row * cell - 0.5, side * cell + 1, cell + 1);
  write(byId("row-title"), "Keys of query ", ...blockText(row));
  const order = every(side).sort((a, b) => weight(head, row, b) - weight(head, row, a)).slice(0, 6), most = weight(head, row, order[0]) || 1;
  write(byId("row-keys"), ...order.map((key) => keyItem(step, key, weight(head, row, key), most, weight(head, row, key).toFixed(3))));
}

function pointPattern(event) {
  const [x, y] = placeIn(event), { side, cell, head } = shown;
  if (!side) return;
  const query = clamp(Math.floor((y - TOP) / cell), 0, side - 1), key = clamp(Math.floor((x - LEFT) / cell), 0, side - 1);
  const value = weight(head, query, key);
  if (event.type === "click") return shown.block === 1 && tell(shown.step, shown.layer, head, numberOf(query), numberOf(key));
  if (Number.isNaN(value)) return write(byId("pattern-readout"), "query ", ...blockText(query), " was not computed in this step: its keys and values come from a cache.");
  return write(byId("pattern-readout"), "query ", ...blockText(query), " gives key ", ...blockText(key), " ", strong(value < 0.001 && value > 0 ? "under 0.001" : value.toFixed(3)), shown.block > 1 ? ` at most (${shown.block} × ${shown.block} positions)` : "");
}

function listKeys() {
  const step = pageStep(), { layer, head } = shown, list = byId("keys");
  if (!has(layer)) return write(list, make("li", "This page does not hold the scores of this layer."));
  const order = Array.from({ length: P }, (_, at) => at).filter((at) => exists(step, at)).sort((a, b) => scoreAt(step, b, layer, head) - scoreAt(step, a, layer, head));
  const most = scoreAt(step, order[0], layer, head) || 1;
  write(list, ...order.slice(0, 12).map((at) => {
    const score = scoreAt(step, at, layer, head), item = keyItem(step, at, score, most, short(score));
    item.classList.toggle("is-sink", Boolean(isSink(step, at, layer, head)));
    return item;
  }));
}

// A line of a list of keys: position, token with a bar of `value` of `most`, and `text`.
function keyItem(step, at, value, most, text) {
  const item = make("li"), bar = make("span", undefined, "bar-of"), fill = make("i");
  fill.style.width = `${(100 * value) / most}%`;
  bar.append(fill, make("bdi", info.vocabulary[data.entered[step * P + at]]));
  item.append(make("span", numberOf(at), "at"), bar, make("span", text, "value"));
  return item;
}

// Index of the chosen head among the heads in the frame.
const headInFrame = () => (byId("circuits-heads").value === "one" ? 0 : shown.head);

function showHead(head) {
  if (shown.asked) { shown.asked.head = head; return; } // drawn with the map that is being read
  shown.head = head;
  drawPattern();
  if (byId("circuits-heads").value === "one") drawCircuitsSoon();
  else if (shown.frame) shown.frame.contentWindow.postMessage({ head }, "*");
}

// Choosing a head above also selects its attention, if the page holds it.
function followHead() {
  const asked = askedNow();
  if (!shown.ready || asked.step === null) return;
  if (view.layer === ALL) return drawPattern();
  const head = view.head === ALL ? asked.head : view.head;
  const known = heldLayers(asked.step).includes(view.layer);
  if (!known || (head === asked.head && view.layer === asked.layer)) return drawPattern();
  if (view.layer === asked.layer) return showHead(head);
  return showAttention({ layer: view.layer, head }).catch(fail);
}

// Choosing a step above also selects its attention, or that of the nearest step the page holds.
function followStep() {
  if (!shown.ready) return;
  clearTimeout(shown.later);
  if (nearestStep() === askedNow().step) return shown.map && nameStep();
  shown.later = setTimeout(() => shown.ready && showAttention({ step: nearestStep() }).catch(fail), run.attention.places ? 0 : 120);
}

// ---- all heads, by CircuitsVis

// At most `cells` cells: neighboring positions are merged into blocks that show their largest value.
function forCircuits() {
  const heads = byId("circuits-heads").value === "one" ? [shown.head] : Array.from({ length: H }, (_, head) => head);
  const { side } = shown, most = Math.max(1, Math.floor(Math.sqrt(run.attention.cells / heads.length))), block = Math.ceil(side / most);
  const edge = Math.ceil(side / block), step = pageStep();
  let peak = 0;
  const attention = heads.map((head) => Array.from({ length: edge }, (_, q) => Array.from({ length: edge }, (_, k) => {
    let value = 0;
    for (let query = q * block; query < Math.min(side, (q + 1) * block); query++)
      for (let key = k * block; key < Math.min(side, (k + 1) * block); key++) value = Math.max(value, entry(head, query, key) || 0);
    value = Math.round(shown.value(value) * 1e4) / 1e4;
    peak = Math.max(peak, value);
    return value;
  })));
  const wide = block * shown.block, end = Math.min(P, side * shown.block);
  const tokens = Array.from({ length: edge }, (_, at) => (wide === 1 ? info.vocabulary[data.entered[step * P + at]]
    : `${numberOf(at * wide)}–${numberOf(Math.min(end, (at + 1) * wide) - 1)}`));
  const props = { attention, tokens, attentionHeadNames: heads.map((head) => `Head ${head}`), maskUpperTri: info.causal, maxValue: peak || 1 };
  return { props, wide };
}

function drawCircuitsSoon() {
  if (!shown.map) return;
  clearTimeout(shown.timer);
  byId("circuits").classList.add("busy");
  shown.due = !shown.near; // drawn once it comes into view
  if (shown.near) shown.timer = setTimeout(() => drawCircuits().catch(fail), 60);
}

async function drawCircuits() {
  shown.script ??= await run.attention.script();
  if (!shown.map) return; // another run is being shown
  const { props, wide } = forCircuits(), frame = document.createElement("iframe"), { step, layer } = shown;
  const old = shown.frame, label = `Attention heads of step ${step}, layer ${layer}`, heads = byId("circuits-heads").value;
  byId("circuits").querySelectorAll("iframe.coming").forEach((other) => other.remove());
  frame.className = "coming";
  frame.title = label;
  frame.setAttribute("sandbox", "allow-scripts");
  run.attention.load(frame);
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
    byId("circuits").dataset.shown = `${step}/${layer}/${heads}`;
    performance.measure("circuitsvis", { start: began, end: performance.now() });
    byId("circuits-note").textContent = `Step ${step}, layer ${layer}; full color is ${props.maxValue.toPrecision(2)}.`
      + (wide === 1 && info.first ? ` CircuitsVis counts positions from the first token, which is position ${info.first} here.` : "")
      + (wide > 1 ? ` Each cell covers ${wide} × ${wide} positions and shows the largest value, since CircuitsVis is slow with many cells.` : "");
  };
  byId("circuits-note").textContent = "Drawing…";
  byId("circuits").append(frame);
}

function listenAttention() {
  const again = (part) => (event) => showAttention({ [part]: Number(event.target.value) }).catch(fail);
  byId("attention-step").addEventListener("change", again("step"));
  byId("attention-layer").addEventListener("change", again("layer"));
  byId("attention-head").addEventListener("change", (event) => showHead(Number(event.target.value)));
  byId("circuits-heads").addEventListener("change", drawCircuitsSoon);
  for (const kind of ["pointermove", "pointerdown", "click"]) byId("pattern").addEventListener(kind, pointPattern);
  addEventListener("message", (event) => shown.talk && shown.talk(event));
  new IntersectionObserver((entries) => {
    shown.near = entries.at(-1).isIntersecting;
    if (shown.near && shown.due) drawCircuitsSoon();
  }, { rootMargin: "300px" }).observe(byId("circuits"));
}

// Shows the attention of the run on the page: of the step shown, or the nearest that it holds, and of the layer shown.
function startAttention() {
  const { places, why } = run.attention, none = places !== null && !places.length;
  byId("attention-choice").hidden = none;
  shown.ready = !none;
  if (none) { clearAttention(why); return; }
  fillAttention();
  showAttention({ step: nearestStep(), layer: Math.max(0, view.layer), head: Math.max(0, view.head) }).then(() => performance.mark("attention")).catch(fail);
}
