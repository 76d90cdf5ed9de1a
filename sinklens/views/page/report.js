// The report: the selection (step, layer, head), its controls, and the canvas of tokens.
// Numbers come from the page: `info` (JSON) and chunks. Model text is set as text, never as markup.

const ALL = -1; // as layer: the mean over all heads of all layers; as head: the mean over the heads of the layer
const MISSING = 0, MASK = 1; // indices in the vocabulary: a position that does not exist yet, the mask

const info = readJson("info");
const view = { step: 0, layer: ALL, head: ALL, position: null, playing: null };
const data = {}; // chunks of the whole run, by name
const layers = new Map(); // layer -> { scores, sinks }, each [1 + head, step, position]; row 0 is their mean
const T = info.steps.length, P = info.positions, H = info.heads, L = info.layers;

function make(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

// A line of text from strings and nodes; strings are text.
function write(node, ...parts) { node.replaceChildren(...parts.filter((part) => part !== null && part !== "")); }
const strong = (text) => make("b", text);
const quoted = (text) => make("bdi", text);

const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const count = (n, one, many) => `${n} ${n === 1 ? one : many || one + "s"}`;

// ---- numbers

async function loadLayer(layer) {
  if (layers.has(layer)) return;
  const name = layer === ALL ? "all" : String(layer);
  const [scores, sinks] = await Promise.all([readBytes("scores-" + name), readBytes("sinks-" + name)]);
  const kind = info.levels > 255 ? Uint16Array : Uint8Array;
  layers.set(layer, { scores: new kind(scores), sinks: new Uint8Array(sinks), peaks: info.peaks[name] });
}

const rowOf = (head) => (head === ALL ? 0 : head + 1);
const exists = (step, at) => data.entered[step * P + at] !== MISSING;
const committed = (step, at) => data.committed[step * P + at] === 1;
const tokenAt = (step, at) => (committed(step, at) ? data.left : data.entered)[step * P + at];
const textAt = (step, at) => info.vocabulary[tokenAt(step, at)];
const numberOf = (at) => info.first + at;

function scoreAt(step, at, layer = view.layer, head = view.head) {
  const from = layers.get(layer), row = rowOf(head);
  return from.peaks[row] * (from.scores[(row * T + step) * P + at] / info.levels) ** 2;
}

function isSink(step, at, layer = view.layer, head = view.head) {
  const bit = (rowOf(head) * T + step) * P + at;
  return (layers.get(layer).sinks[bit >> 3] >> (7 - (bit & 7))) & 1;
}

// Position of the strongest key; null where all attention is zero.
function strongestAt(step, layer = view.layer, head = view.head) {
  const column = layer === ALL ? 0 : head === ALL ? 1 + layer : 1 + L + layer * H + head;
  const at = data.path[step * (1 + L + L * H) + column];
  return at < 0 ? null : at;
}

const peakNow = () => layers.get(view.layer).peaks[rowOf(view.head)];
const existing = (step) => { let n = 0; for (let at = 0; at < P; at++) n += exists(step, at); return n; };

function whose(layer = view.layer, head = view.head) {
  if (layer === ALL) return `the mean of all ${L * H} heads`;
  return head === ALL ? `the mean of the ${H} heads of layer ${layer}` : `layer ${layer}, head ${head}`;
}

// ---- controls

const has = (layer) => layer === ALL || info.held.includes(layer);

async function choose(layer, head) {
  if (!has(layer)) return false;
  const wanted = (view.asked = `${layer}/${head}`);
  await loadLayer(layer);
  if (view.asked !== wanted) return true; // the selection has changed in the meantime
  Object.assign(view, { layer, head: layer === ALL ? ALL : head });
  byId("layer").value = layer;
  byId("head").value = view.head;
  byId("head").disabled = layer === ALL;
  drawChoice();
  return true;
}

function goTo(step) {
  view.step = Math.max(0, Math.min(T - 1, step));
  drawStep();
}

function play(on) {
  clearInterval(view.playing);
  view.playing = null;
  if (on && T > 1) {
    if (view.step === T - 1) goTo(0);
    view.playing = setInterval(() => { goTo(view.step + 1); if (view.step === T - 1) play(false); }, Math.max(70, Math.min(550, 24000 / T)));
  }
  byId("sentence").setAttribute("aria-live", view.playing !== null ? "off" : "polite");
  byId("play").setAttribute("aria-pressed", String(view.playing !== null));
  byId("play").querySelector(".label").textContent = view.playing !== null ? "Pause" : "Play";
}

const everyHead = () => [[ALL, ALL], ...info.held.flatMap((layer) => Array.from({ length: H + 1 }, (_, n) => [layer, n - 1]))];

function nextHead(by) {
  const places = everyHead(), now = places.findIndex(([layer, head]) => layer === view.layer && head === view.head);
  choose(...places[(now + by + places.length) % places.length]);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, summary")) return;
  const far = Math.max(1, Math.round(T / 10));
  const moves = { ArrowLeft: view.step - 1, ArrowRight: view.step + 1, Home: 0, End: T - 1, PageDown: view.step + far, PageUp: view.step - far };
  const slider = event.target.id === "step";
  if (slider) Object.assign(moves, { ArrowDown: view.step - 1, ArrowUp: view.step + 1 });
  if (!slider && event.key.startsWith("Page")) return;
  if (event.key in moves) { play(false); goTo(moves[event.key]); }
  else if (event.key === " " && !event.target.closest("button")) play(view.playing === null);
  else if (event.key === "[" || event.key === "]") nextHead(event.key === "]" ? 1 : -1);
  else return;
  event.preventDefault();
}

function option(value, text, disabled = false) {
  const node = make("option", text);
  node.value = value;
  node.disabled = disabled;
  return node;
}

function buildControls() {
  const slider = byId("step");
  slider.max = T - 1;
  for (const id of ["step", "play", "back", "forward"]) byId(id).disabled = T < 2;
  slider.addEventListener("input", () => { play(false); goTo(Number(slider.value)); });
  byId("play").addEventListener("click", () => play(view.playing === null));
  byId("back").addEventListener("click", () => { play(false); goTo(view.step - 1); });
  byId("forward").addEventListener("click", () => { play(false); goTo(view.step + 1); });
  byId("layer").append(option(ALL, "all, mean"));
  for (let layer = 0; layer < L; layer++) byId("layer").append(option(layer, has(layer) ? layer : `${layer} (not in this page)`, !has(layer)));
  byId("head").append(option(ALL, "mean"), ...Array.from({ length: H }, (_, head) => option(head, head)));
  byId("layer").addEventListener("change", () => choose(Number(byId("layer").value), view.head));
  byId("head").addEventListener("change", () => choose(view.layer, Number(byId("head").value)));
  document.addEventListener("keydown", onKey);
}

function buildHeader() {
  document.title = `${info.model} · sinklens report`;
  byId("model").textContent = info.model;
  for (const [value, label] of info.facts) {
    const item = make("li");
    write(item, value && strong(value), ` ${label}`);
    byId("facts").append(item);
  }
  byId("prompt").textContent = info.prompt;
  byId("answer").textContent = info.answer;
  byId("notes").append(...info.notes.map((note) => make("li", note)));
  for (const [name, value] of info.settings) byId("settings").append(make("dt", name), make("dd", value));
}

// ---- the canvas of tokens

const tokens = [];

function buildTokens() {
  const parts = [["Prompt", 0, info.prompt_positions], ["Answer", info.prompt_positions, P]];
  for (const [name, from, to] of parts) {
    if (from === to) continue;
    const part = make("div", undefined, `part ${name.toLowerCase()}`), flow = make("div", undefined, "flow");
    part.append(make("div", name, "name"), flow);
    for (let at = from; at < to; at++) {
      const token = make("span", undefined, "tok");
      token.dataset.at = at;
      token.style.minWidth = `calc(${widest(at)}ch + 6px)`;
      tokens.push(token);
      flow.append(token);
      if (breaksAfter(at)) flow.append(make("br"));
    }
    byId("tokens").append(part);
  }
  const pointAt = (event) => { const token = event.target.closest(".tok"); if (token) point(Number(token.dataset.at)); };
  byId("tokens").addEventListener("pointerover", pointAt);
  byId("tokens").addEventListener("click", pointAt);
}

// Width of the longest token at this position in any step, so that the text does not shift while it fills in.
function widest(at) {
  let most = 1;
  for (let step = 0; step < T; step++) most = Math.max(most, info.vocabulary[tokenAt(step, at)].length);
  return Math.min(most, 8);
}

const breaksAfter = (at) => textAt(T - 1, at).endsWith("⏎");

function drawTokens() {
  const { step } = view, strongest = strongestAt(step), peak = peakNow();
  tokens.forEach((token, at) => {
    const here = tokenAt(step, at), scored = exists(step, at);
    token.textContent = info.vocabulary[here] || " ";
    token.classList.toggle("later", here === MISSING);
    token.classList.toggle("mask", here === MASK);
    token.classList.toggle("new", committed(step, at));
    token.classList.toggle("sink", Boolean(scored && isSink(step, at)));
    token.classList.toggle("strongest", at === strongest);
    token.classList.toggle("pointed", at === view.position);
    const color = scored ? shade(scoreAt(step, at), peak) : null;
    token.style.backgroundColor = color ? color.css : "transparent";
    token.style.color = color ? color.text : "";
  });
}

// Description of a position at a step, by default the step shown.
function describe(at, step = view.step) {
  const token = quoted(textAt(step, at) || "…"), place = ["position ", strong(numberOf(at)), " ", token];
  if (!exists(step, at)) return [...place, committed(step, at) ? " is added in this step" : " does not exist yet"];
  const score = scoreAt(step, at), share = (100 * score) / existing(step);
  const state = committed(step, at) ? ", decided in this step" : tokenAt(step, at) === MASK ? ", undecided" : "";
  const heads = data.heads[step * P + at];
  return [...place, " receives ", strong(short(score)), ` (${short(share)} % of all attention)`,
    isSink(step, at) ? ", a sink" : "", `; a sink in ${heads} of ${count(L * H, "head")}`, state];
}

function point(at) {
  view.position = at;
  tokens.forEach((token) => token.classList.toggle("pointed", Number(token.dataset.at) === at));
  write(byId("token-readout"), ...describe(at));
  drawPointer();
}

// ---- drawing

function sentence() {
  const { step } = view, at = strongestAt(step), who = whose();
  let open = 0, sinks = 0;
  for (let place = 0; place < P; place++) {
    open += data.entered[step * P + place] === MASK;
    sinks += exists(step, place) && isSink(step, place);
  }
  const state = info.causal ? `${count(existing(step), "position exists", "positions exist")} when it begins. ` : `${count(open, "position is", "positions are")} undecided when it begins. `;
  const start = [strong(`Step ${info.steps[step]}. `), state];
  if (at === null) return [...start, `${who[0].toUpperCase()}${who.slice(1)} has no attention at all.`];
  const score = scoreAt(step, at), where = strong(`position ${numberOf(at)}`);
  where.className = "where";
  return [...start, `In ${who}, most attention goes to `, where, " ", quoted(info.vocabulary[data.entered[step * P + at]]),
    `, which receives ${short(score)} times its uniform share, ${short((100 * score) / existing(step))} % of all attention. `,
    sinks === 0 ? "No position is a sink." : `${count(sinks, "position is a sink", "positions are sinks")}.`];
}

function drawStep() {
  byId("step").value = view.step;
  byId("step").setAttribute("aria-valuetext", `step ${info.steps[view.step]}`);
  write(byId("clock"), "step ", strong(info.steps[view.step]), ` of ${info.steps[T - 1]}`);
  write(byId("sentence"), ...sentence());
  drawTokens();
  drawPointer();
  if (view.position !== null) write(byId("token-readout"), ...describe(view.position));
}

function drawChoice() {
  drawScale(byId("scale"), peakNow(), "the scores");
  drawHeat();
  drawGrid();
  drawPath();
  drawStep();
  followHead();
}

function fail(error) {
  byId("trouble").textContent = String(error.message || error);
  byId("trouble").hidden = false;
}
