// Run A beside run B: texts and canvases with their differences marked, and the change at each step.

const other = (slot) => (slot === "A" ? "B" : "A");
const lastText = (step, of) => Math.min(step, of.info.steps.length - 1);

function tokenAtStep(of, step, pos) {
  const place = step * of.info.positions + pos;
  return of.info.vocabulary[(of.data.committed[place] ? of.data.left : of.data.entered)[place]];
}

async function compare() {
  const { A, B } = lab, card = byId("compare"), ready = A && B && [A, B].every((id) => lab.runs.has(id) && !isActive(id));
  card.setAttribute("aria-busy", String(Boolean(B && !ready)));
  drawVerdict();
  if (!B) card.hidden = true;
  for (const of of lab.opened.values()) of.differs = lab.pair && ready ? of.differs : null;
  if (!ready) return;
  let a, b, numbers;
  const key = `${A}/${B}`;
  try {
    [a, b] = await Promise.all([opened(A), opened(B)]);
    if (lab.A !== A || lab.B !== B) return;
    if (!a || !b || a.live || b.live) { card.hidden = true; return; }
    numbers = lab.pair?.key === key ? null : await askJson(`/api/compare?a=${A}&b=${B}&kl=0`);
  } catch (error) {
    if (lab.A === A && lab.B === B) notCompared(error);
    return;
  }
  if (lab.A !== A || lab.B !== B) return;
  if (lab.pair?.key !== key) { // nor has another call compared them in the meantime
    const pair = (lab.pair = { key, a, b, ...numbers, measuring: !numbers.kl_why });
    if (pair.measuring) setTimeout(() => addDivergence(pair, A, B), 250); // a further change goes first
  }
  markDifferences(lab.pair);
  card.hidden = false;
  drawTokens();
  drawCompare();
  drawDifferences(lab.pair);
  drawVerdict();
  card.dataset.pair = lab.pair.key;
  if (!lab.pair.measuring) card.dataset.measured = lab.pair.key;
  timed("picture");
}

// Without the comparison, nothing of an earlier one remains on the page.
function notCompared(error) {
  Object.assign(lab, { pair: null });
  for (const of of lab.opened.values()) of.differs = null;
  byId("compare").hidden = true;
  drawTokens();
  drawVerdict(`A and B cannot be compared: ${error.message}`);
}

// The KL divergence takes a pass for every step, so it arrives later.
const addDivergence = attempt(async (pair, A, B) => {
  if (lab.pair !== pair || lab.A !== A || lab.B !== B) return;
  const { kl, kl_free, kl_why } = await askJson(`/api/compare?a=${A}&b=${B}`).catch((error) => ({ kl: null, kl_free: null, kl_why: `KL cannot be measured: ${error.message}` }));
  Object.assign(pair, { kl, kl_free, kl_why, measuring: false });
  if (lab.pair !== pair) return;
  drawCompare();
  drawVerdict();
  byId("compare").dataset.measured = pair.key;
  timed("divergence");
});

// Time since the last change of the run, as a performance entry.
function timed(name) {
  if (performance.getEntriesByName("chip", "mark").length) performance.measure(name, "chip");
}

// Positions of A and B are compared from the end of their prompts.
function markDifferences(pair) {
  const { a, b } = pair, cells = new Set(pair.cells.map(([step, pos]) => `${step}/${pos}`)), shift = b.info.prompt_positions - a.info.prompt_positions;
  const differs = (step, pos) => step < a.info.steps.length && step < b.info.steps.length && pos < a.info.positions && pos + shift < b.info.positions
    && (cells.has(`${step}/${pos}`) || tokenAtStep(a, step, pos) !== tokenAtStep(b, step, pos + shift));
  a.differs = differs;
  b.differs = (step, pos) => pos >= shift && differs(step, pos - shift);
}

function drawSide(slot, of, pair) {
  const text = pair.texts[slot === "A" ? 0 : 1] ?? "", opposite = pair.texts[slot === "A" ? 1 : 0] ?? "";
  const right = pair.right && pair.right[slot === "A" ? 0 : 1], summary = summaryOf(of.id);
  const title = byId(`side-${slot}-title`);
  write(title, `Run ${slot}`, summary.model ? `, ${summary.model}` : "", right === null || right === undefined ? "" : make("span", right ? " ✓ right" : " ✗ wrong", "judged"));
  write(byId(`text-${slot}`), ...differingParts(text, opposite));
  const flow = make("div", undefined, "flow"), step = lastText(view.step, of);
  for (let pos = of.info.prompt_positions; pos < of.info.positions; pos++) {
    const place = step * of.info.positions + pos, token = make("span", tokenAtStep(of, step, pos) || " ", "tok");
    token.classList.toggle("new", of.data.committed[place] === 1);
    token.classList.toggle("differs", of.differs(step, pos));
    token.title = `position ${pos}`;
    flow.append(token);
  }
  foldEnd(flow, [...flow.children].slice(endOf(of) + 1 - of.info.prompt_positions));
  write(byId(`tokens-${slot}`), make("div", `Canvas, step ${of.info.steps[step]}${of.info.modes ? `, ${of.info.modes[step]} pass` : ""}`, "name"), flow);
}

// The words of a text; those that the other text does not have at the same place are marked.
function differingParts(text, opposite) {
  const words = text.split(/(\s+)/), others = opposite.split(/(\s+)/);
  return words.map((word, at) => (word === others[at] || !word.trim() ? word : make("span", word, "differs")));
}

function drawCompare() {
  const { pair } = lab;
  if (!pair || byId("compare").hidden || !pair.a.differs) return;
  drawSide("A", pair.a, pair);
  drawSide("B", pair.b, pair);
  const { first_difference: first, kl, kl_why: why } = pair, known = (kl || []).filter((value) => value !== null);
  const said = pair.texts[0] === pair.texts[1] ? "The answers are the same." : "The answers differ.";
  const canvases = first === null || first === undefined ? " The canvases are the same at every step." : ` The canvases first differ at step ${first}.`;
  const most = known.length ? ` The largest KL on A's canvases is ${small(Math.max(...known))} nats, at step ${kl.indexOf(Math.max(...known))}.` : why ? ` ${why}` : pair.measuring ? " KL is being measured…" : "";
  byId("compare-text").textContent = said + canvases + most + (summaryOf(lab.B).replay ? " B runs on the canvases of A." : "");
  drawChange();
  fillTable();
}

// ---- the change at each step: KL on a log scale above, share of moved sinks below

const ON_A = "KL on A's canvases (nats, log scale)", FREE = "KL free-running (nats, log scale)";
// The divergences of a pair; a run that replays A has no other canvases.
const divergencesOf = ({ kl, kl_free: free, kl_why: why }) => (why ? [] : [[ON_A, kl || []], ...(summaryOf(lab.B).replay ? [] : [[FREE, free || []]])]);
const SMALLEST = 1e-6; // of the largest bar on a log scale

// Heights from 0 to 1 and the labels of both ends, linear or, for divergences, on one log scale.
function linearScale(values) {
  const peak = Math.max(1e-9, ...values.map((value) => value ?? 0));
  return { height: (value) => value / peak, labels: ["0", short(peak <= 1e-9 ? 0 : peak)] };
}

function logScale(values) {
  const known = values.filter((value) => value > 0), peak = Math.max(1e-9, ...known), low = Math.max(SMALLEST * peak, Math.min(peak, ...known) / 2);
  return { height: (value) => (value > 0 ? clamp(Math.log(value / low) / Math.log(peak / low), 0.01, 1) : 0), labels: [small(low), small(peak)] };
}

// Heads of two models with the same number have nothing in common.
const movedOf = (pair) => (twoModels() ? [] : pair.sinks_moved || []);

const change = { left: 46, top: 16, high: 64, gap: 26, bottom: 22 };
const cellsAt = (step) => lab.pair.cells.filter(([at]) => at === step).length;

function drawChange() {
  const { pair } = lab, kls = divergencesOf(pair), moved = movedOf(pair), n = Math.min(pair.a.info.steps.length, pair.b.info.steps.length), canvas = byId("change");
  const differing = Array.from({ length: n }, (_, step) => cellsAt(step));
  const second = twoModels() ? ["cells that differ", differing] : ["sinks moved", moved];
  const log = logScale(kls.flatMap(([, values]) => values)), rows = [...kls.map((row) => [...row, log]), [...second, linearScale(second[1])]];
  change.width = Math.max(120, Math.min(900, widthOf(canvas) - change.left - 12));
  change.steps = n;
  const high = rows.length * (change.high + change.gap) - change.gap;
  const brush = sized(canvas, change.left + change.width + 12, change.top + high + change.bottom);
  rows.forEach(([name, values, scale], row) => drawBars(brush, name, values, scale, change.top + row * (change.high + change.gap), n));
  brush.textAlign = "center";
  brush.fillStyle = inkOf("soft");
  for (const step of ticks(n, change.width, 34)) brush.fillText(step, change.left + ((step + 0.5) * change.width) / n, change.top + high + 15);
  brush.fillStyle = inkOf("accent");
  brush.globalAlpha = 0.45;
  brush.fillRect(change.left + ((view.step + 0.5) * change.width) / n - 0.75, change.top, 1.5, high);
  brush.globalAlpha = 1;
  canvas.setAttribute("aria-label", `${byId("compare-text").textContent} The table below lists the numbers per step.`);
}

function drawBars(brush, name, values, { height, labels }, top, n) {
  const wide = change.width / n;
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "left";
  brush.fillText(name, change.left, top - 5);
  brush.textAlign = "right";
  if (values.length) brush.fillText(labels[1], change.left - 6, top + 8);
  brush.fillText(labels[0], change.left - 6, top + change.high);
  brush.fillRect(change.left, top + change.high, change.width, 1);
  brush.fillStyle = ramp().length ? `rgb(${ramp()[dark.matches ? 170 : 150].join(" ")})` : inkOf("ink");
  values.forEach((value, step) => {
    if (value !== null) brush.fillRect(change.left + step * wide + 0.5, top + change.high * (1 - height(value)), Math.max(1, wide - 1), change.high * height(value));
    else { brush.fillRect(change.left + (step + 0.5) * wide - 0.5, top + change.high - 5, 1, 5); }
  });
}

function fillTable() {
  const { kl, kl_free: free } = lab.pair, moved = movedOf(lab.pair);
  write(byId("change-table").tBodies[0], ...Array.from({ length: change.steps }, (_, step) => {
    const row = make("tr"), number = (value) => (value === null || value === undefined ? "–" : value.toPrecision(3));
    row.append(make("td", step), make("td", number(kl && kl[step])), make("td", number(free && free[step])), make("td", number(moved && moved[step])), make("td", cellsAt(step)));
    return row;
  }));
}

const changeStep = (event) => clamp(Math.floor(((placeIn(event)[0] - change.left) / change.width) * change.steps), 0, change.steps - 1);

function listenCompare() {
  document.querySelector(".card.heat").before(byId("compare"));
  const key = make("span");
  key.append(make("i", undefined, "swatch differs"), "differs from the other run");
  document.querySelector(".card.canvas .key").append(key);
  byId("change").addEventListener("pointermove", (event) => {
    const step = changeStep(event), moved = movedOf(lab.pair), known = divergencesOf(lab.pair).filter(([, values]) => typeof values[step] === "number");
    write(byId("change-readout"), "step ", strong(step), ": ", known.map(([name, values]) => `${name.split(" (")[0]} ${values[step].toPrecision(3)} nats`).join("; ") || "no KL",
      typeof moved[step] === "number" ? `; ${Math.round(100 * moved[step])} % of the strongest keys are elsewhere` : "", `; ${count(cellsAt(step), "cell differs", "cells differ")}`);
  });
  byId("change").addEventListener("click", (event) => goTo(changeStep(event)));
  new MutationObserver(() => { drawCompare(); listProposals(); keep(); }).observe(byId("clock"), { childList: true, subtree: true, characterData: true });
}
