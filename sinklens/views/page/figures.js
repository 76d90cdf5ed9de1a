// The figures drawn on canvas elements: color scale, step × position, layer × head, path of the strongest key.

const dark = matchMedia("(prefers-color-scheme: dark)");
const shades = {}; // "sequential" and "dark" -> 256 entries of [r, g, b]

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const inkOf = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function ramp() {
  const name = dark.matches ? "dark" : "sequential", stops = RAMPS[name].map(channels);
  return (shades[name] ??= Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((from, c) => Math.round(from + (stops[low + 1][c] - from) * (place - low)));
  }));
}

// Color of a score, with `peak` the largest: (score / peak)^γ, with γ such that 1, uniform attention, is pale for any
// peak.
const UNIFORM = 0.2;
const gamma = (peak) => clamp(Math.log(UNIFORM) / Math.log(1 / Math.max(peak, 1.01)), 0.4, 1.6);
const level = (score, peak) => clamp(Math.round(255 * (score / peak) ** gamma(peak)), 0, 255);
const attentionLevel = (share) => clamp(Math.round(255 * Math.sqrt(share)), 0, 255);

const shade = (score, peak) => inked(level(score, peak));

// A color of the ramp, 0 to 255, with black or white for the text on it: whichever has more contrast, at least 4.5 : 1.
const linear = (channel) => (channel <= 10 ? channel / 3295 : ((channel / 255 + 0.055) / 1.055) ** 2.4);
function inked(place) {
  const [r, g, b] = ramp()[place], light = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  return { css: `rgb(${r} ${g} ${b})`, text: light > 0.179 ? "#000000" : "#ffffff" };
}

// Sets the size of a canvas in CSS pixels, sharp on any screen.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const brush = canvas.getContext("2d");
  brush.scale(ratio, ratio);
  brush.font = "12.5px system-ui, sans-serif";
  brush.fillStyle = inkOf("soft");
  return brush;
}

// Positions of an axis to label: `size` positions on `length` pixels, counted from `first`, at round numbers.
function ticks(size, length, room, first = 0) {
  const most = Math.max(1, Math.floor(length / room));
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000].find((n) => size / n <= most) || size;
  return Array.from({ length: size }, (_, at) => at).filter((at) => (first + at) % step === 0);
}

// The names of both axes of a figure whose numbers end `EDGE` pixels left of it and below it.
const EDGE = 20, LEFT = 50, BOTTOM = EDGE + 16;
function nameAxes(brush, left, top, width, height, across, down) {
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "center";
  brush.fillText(across, left + width / 2, top + height + EDGE + 11);
  brush.save();
  brush.translate(11, top + height / 2);
  brush.rotate(-Math.PI / 2);
  brush.fillText(down, 0, 0);
  brush.restore();
}

// A second surface of the same size and scale, for everything that does not change from step to step.
function behind(canvas, brush) {
  const base = new OffscreenCanvas(canvas.width, canvas.height), copy = base.getContext("2d");
  copy.setTransform(brush.getTransform());
  copy.font = brush.font;
  return [base, copy];
}

function blit(brush, base) {
  brush.save();
  brush.setTransform(1, 0, 0, 1, 0, 0);
  brush.clearRect(0, 0, base.width, base.height);
  brush.drawImage(base, 0, 0);
  brush.restore();
}

// Pixels of `rows` × `columns` values in 0…255 (null: empty), as an image to be drawn at any size.
function image(rows, columns, valueAt) {
  const canvas = new OffscreenCanvas(columns, rows), brush = canvas.getContext("2d"), colors = ramp();
  const pixels = brush.createImageData(columns, rows);
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, at += 4) {
      const value = valueAt(row, column);
      if (value === null) continue;
      pixels.data.set(colors[value], at);
      pixels.data[at + 3] = 255;
    }
  }
  brush.putImageData(pixels, 0, 0);
  return canvas;
}

// Records where the cells are, for scripts that hover over them.
function remember(canvas, { left, top, cell, high }) { canvas.dataset.cells = [left, top, cell, high].join(" "); }

const widthOf = (canvas) => canvas.parentElement.clientWidth;
const placeIn = (event) => { const box = event.currentTarget.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

// ---- color scale

function drawScale(canvas, peak, what) {
  const width = Math.min(220, widthOf(canvas) - 30), power = gamma(peak), brush = sized(canvas, width + 30, 30);
  for (let x = 0; x < width; x++) {
    brush.fillStyle = `rgb(${ramp()[Math.round((255 * x) / width)].join(" ")})`;
    brush.fillRect(x + 8, 0, 1.5, 12);
  }
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "center";
  let last = -40;
  for (const value of [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, peak]) {
    const x = width * (value / peak) ** power;
    if (value > peak || x - last < 24 || (value !== peak && x > width - 30)) continue;
    last = x;
    brush.fillRect(x + 7.5, 12, 1, 3);
    brush.fillText(value === peak ? short(peak) : value, clamp(x + 8, 8, width + 12), 27);
  }
  canvas.setAttribute("aria-label", `Color scale of ${what}, from 0 to ${short(peak)}${what.includes("score") ? "; uniform attention is 1" : ""}`);
}

// ---- step × position

const heat = { left: LEFT, bottom: BOTTOM, top: 6 };

function drawHeat() {
  const canvas = byId("heat"), room = widthOf(canvas);
  heat.cell = Math.max(1.2, Math.min(26, (room - heat.left - 6) / P));
  heat.high = clamp(320 / T, 0.5, 24);
  heat.width = heat.cell * P;
  heat.height = Math.max(heat.high * T, 22);
  heat.high = heat.height / T;
  heat.brush = sized(canvas, heat.left + heat.width + 6, heat.top + heat.height + heat.bottom);
  const peak = peakNow();
  heat.at ??= null;
  remember(canvas, heat);
  heat.cells = image(T, P, (step, at) => (exists(step, at) ? level(scoreAt(step, at), peak) : null));
  heat.base = heatBase();
  paintHeat();
}

function heatBase() {
  const { left, top, cell, high, width, height, cells } = heat;
  const [base, brush] = behind(byId("heat"), heat.brush);
  brush.imageSmoothingEnabled = high < 1 || cell < 1;
  brush.drawImage(cells, left, top, width, height);
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "right";
  for (const step of ticks(T, height, 16)) brush.fillText(info.steps[step], left - 8, top + (step + 0.5) * high + 4);
  brush.textAlign = "center";
  for (const at of ticks(P, width, 34, info.first)) brush.fillText(numberOf(at), left + (at + 0.5) * cell, top + height + 14);
  nameAxes(brush, left, top, width, height, "position", "step");
  brush.fillStyle = inkOf("ink");
  const edge = left + info.prompt_positions * cell;
  for (let y = top; y < top + height; y += 5) brush.fillRect(edge - 0.5, y, 1, 2.5);
  const size = clamp(Math.min(cell, high) * 0.36, 1.2, 4.5);
  brush.strokeStyle = inkOf("card");
  brush.fillStyle = inkOf("new");
  for (let step = 0; step < T; step++) for (let at = 0; at < P; at++) if (committed(step, at)) mark(brush, step, at, size * 0.75, true);
  brush.fillStyle = inkOf("accent");
  for (let step = 0; step < T; step++) {
    const at = strongestAt(step);
    if (at !== null) mark(brush, step, at, size, false);
  }
  return base;
}

function mark(brush, step, at, size, square) {
  const x = heat.left + (at + 0.5) * heat.cell, y = heat.top + (step + 0.5) * heat.high;
  brush.beginPath();
  if (square) brush.rect(x - size, y - size, 2 * size, 2 * size);
  else brush.arc(x, y, size, 0, 7);
  brush.fill();
  if (size > 2) brush.stroke();
}

function paintHeat() {
  const { brush, left, top, cell, high, width, height } = heat, y = top + view.step * high;
  blit(brush, heat.base);
  brush.strokeStyle = inkOf("accent");
  brush.lineWidth = 1.5;
  brush.strokeRect(left - 1, y - 0.5, width + 2, Math.max(high, 2) + 1);
  brush.fillStyle = inkOf("accent");
  brush.beginPath();
  brush.moveTo(left - 7, y + high / 2 - 4); brush.lineTo(left - 2, y + high / 2); brush.lineTo(left - 7, y + high / 2 + 4);
  brush.fill();
  if (view.position === null) return;
  brush.strokeStyle = inkOf("ink");
  brush.lineWidth = 1;
  brush.strokeRect(left + view.position * cell - 0.5, top, Math.max(cell, 2), height);
}

function heatCell(event) {
  const [x, y] = placeIn(event);
  return [clamp(Math.floor((y - heat.top) / heat.high), 0, T - 1), clamp(Math.floor((x - heat.left) / heat.cell), 0, P - 1)];
}

function pointHeat(step, at) {
  heat.at = [step, at];
  write(byId("heat-readout"), "step ", strong(info.steps[step]), ", ", ...describe(at, step));
  point(at);
}

function heatKey(event) {
  const [step, at] = heat.at || [view.step, strongestAt(view.step) ?? 0];
  const to = { ArrowLeft: [step, at - 1], ArrowRight: [step, at + 1], ArrowUp: [step - 1, at], ArrowDown: [step + 1, at] }[event.key];
  if (to) pointHeat(clamp(to[0], 0, T - 1), clamp(to[1], 0, P - 1));
  else if (event.key === "Enter") { play(false); goTo(step); }
  else return;
  event.preventDefault();
  event.stopPropagation();
}

// ---- layer × head

// `other`: what the map shows instead of the strongest keys' scores: `values` by layer · H + head (NaN: unknown),
// `marked(layer, head)`, `what`, their name, and `said(layer, head)`, parts of the readout.
const grid = { left: LEFT, bottom: BOTTOM, top: 2, cursor: null, other: null };

function drawGrid() {
  const canvas = byId("grid"), room = widthOf(canvas);
  grid.cell = clamp((room - grid.left - 4) / H, 9, 56);
  grid.high = clamp(380 / L, 9, Math.max(24, Math.min(grid.cell, 44)));
  const brush = sized(canvas, grid.left + grid.cell * H + 4, grid.top + grid.high * L + grid.bottom);
  const values = grid.other ? grid.other.values : data.strength, most = Math.max(0, ...values.filter((value) => value >= 0)) || 1;
  remember(canvas, grid);
  for (let layer = 0; layer < L; layer++) {
    for (let head = 0; head < H; head++) {
      const x = grid.left + head * grid.cell, y = grid.top + layer * grid.high, value = values[layer * H + head];
      const color = Number.isNaN(value) ? { css: inkOf("field"), text: inkOf("ink") } : shade(value, most);
      brush.globalAlpha = has(layer) ? 1 : 0.4;
      brush.fillStyle = color.css;
      brush.fillRect(x + 0.5, y + 0.5, grid.cell - 1, grid.high - 1);
      brush.fillStyle = color.text;
      if (grid.other?.marked(layer, head)) dot(brush, x + grid.cell / 2, y + grid.high / 2, clamp(grid.high / 7, 2, 5));
    }
  }
  brush.globalAlpha = 1;
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "right";
  for (const layer of ticks(L, grid.high * L, 15)) brush.fillText(layer, grid.left - 8, grid.top + (layer + 0.5) * grid.high + 4);
  brush.textAlign = "center";
  for (const head of ticks(H, grid.cell * H, 22)) brush.fillText(head, grid.left + (head + 0.5) * grid.cell, grid.top + grid.high * L + 14);
  nameAxes(brush, grid.left, grid.top, grid.cell * H, grid.high * L, "head", "layer");
  outlineGrid(brush);
  drawScale(byId("grid-scale"), most, grid.other ? grid.other.what : "strongest key scores");
  gridReadout(view.layer, view.head);
}

function outlineGrid(brush) {
  if (view.layer === ALL) return;
  const wide = view.head === ALL ? H : 1, from = view.head === ALL ? 0 : view.head;
  brush.lineWidth = 2.5;
  brush.strokeStyle = inkOf("accent");
  brush.strokeRect(grid.left + from * grid.cell, grid.top + view.layer * grid.high, wide * grid.cell, grid.high);
}

function gridReadout(layer, head) {
  const line = byId("grid-readout");
  if (layer === ALL) return write(line, `Shown: ${whose()}. Layers run down, heads across.`);
  if (!has(layer)) return write(line, `Layer ${layer} did not fit into this page; its scores are not included.`);
  if (head === ALL) return write(line, `Shown: ${whose()}.`);
  if (grid.other) return write(line, "layer ", strong(layer), ", head ", strong(head), ": ", ...grid.other.said(layer, head));
  write(line, "layer ", strong(layer), ", head ", strong(head), ": strongest key receives ", strong(short(data.strength[layer * H + head])), ` on average; it moves ${count(moves(layer, head), "time")}`);
}

function moves(layer, head) {
  let n = 0;
  for (let step = 1; step < T; step++) n += strongestAt(step, layer, head) !== strongestAt(step - 1, layer, head);
  return n;
}

const gridCell = (event) => { const [x, y] = placeIn(event); return [Math.floor((y - grid.top) / grid.high), Math.floor((x - grid.left) / grid.cell)]; };
const inGrid = ([layer, head]) => layer >= 0 && layer < L && head >= 0 && head < H;

function gridKey(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!by) return;
  const at = chosen(), now = run.held.indexOf(at.layer), layer = run.held[clamp(now + by[0], 0, run.held.length - 1)];
  choose(now < 0 ? run.held[0] : layer, clamp(at.head + by[1], 0, H - 1));
  event.preventDefault();
  event.stopPropagation();
}

// ---- path of the strongest key

const path = { left: LEFT, bottom: BOTTOM, top: 6 };

function drawPath() {
  const canvas = byId("path"), room = widthOf(canvas);
  path.width = Math.max(160, room - path.left - 10);
  path.height = clamp(heat.height - 18, 200, 340);
  path.x = (step) => path.left + (T === 1 ? path.width / 2 : (step / (T - 1)) * path.width);
  path.y = (at) => path.top + path.height - ((at + 0.5) / P) * path.height;
  path.brush = sized(canvas, path.left + path.width + 10, path.top + path.height + path.bottom);
  const [base, brush] = behind(canvas, path.brush);
  path.base = base;
  shadeUndecided(brush);
  brush.strokeStyle = inkOf("ghost");
  brush.lineWidth = 0.7;
  brush.globalAlpha = clamp(5 / Math.sqrt(L * H), 0.16, 0.5);
  for (let layer = 0; layer < L; layer++) for (let head = 0; head < H; head++) trace(brush, layer, head, ((layer * H + head) / (L * H) - 0.5) * 0.6);
  brush.globalAlpha = 1;
  brush.fillStyle = inkOf("ink");
  for (let x = path.left; x < path.left + path.width; x += 5) brush.fillRect(x, path.y(info.prompt_positions - 0.5), 2.5, 1);
  brush.strokeStyle = brush.fillStyle = inkOf("accent");
  brush.lineWidth = 2;
  trace(brush, view.layer, view.head, 0);
  if (T <= 90) for (let step = 0; step < T; step++) { const at = strongestAt(step); if (at !== null) dot(brush, path.x(step), path.y(at), 2.6, isSink(step, at)); }
  brush.fillStyle = inkOf("soft");
  brush.textAlign = "right";
  for (const at of ticks(P, path.height, 22, info.first)) brush.fillText(numberOf(at), path.left - 8, path.y(at) + 4);
  brush.textAlign = "center";
  for (const step of ticks(T, path.width, 34)) brush.fillText(info.steps[step], path.x(step), path.top + path.height + 14);
  nameAxes(brush, path.left, path.top, path.width, path.height, "step", "position");
  byId("path-text").textContent = `Position of the strongest key. Orange: ${whose()}, filled mark: a sink, hollow: not a sink; gray: every head${info.causal ? "" : "; shaded: undecided"}.`;
  canvas.setAttribute("aria-label", `Position of the strongest key at each step, ${whose()}`);
  paintPath();
}

function shadeUndecided(brush) {
  brush.fillStyle = inkOf("hatch");
  const wide = path.width / Math.max(1, T - 1), high = path.height / P + 0.5;
  for (let step = 0; step < T; step++) {
    for (let at = 0; at < P; at++) {
      const token = data.entered[step * P + at];
      if (token !== MASK) continue;
      const from = Math.max(path.left, path.x(step) - wide / 2), to = Math.min(path.left + path.width, path.x(step) + wide / 2);
      brush.fillRect(from, path.y(at) - high / 2, to - from + 0.5, high);
    }
  }
}

function dot(brush, x, y, size, full = true) {
  brush.beginPath();
  brush.arc(x, y, size, 0, 7);
  if (!full) { brush.save(); brush.fillStyle = inkOf("paper"); brush.fill(); brush.restore(); brush.lineWidth = 1.3; brush.stroke(); }
  else brush.fill();
}

function trace(brush, layer, head, aside) {
  brush.beginPath();
  let down = false;
  for (let step = 0; step < T; step++) {
    const at = strongestAt(step, layer, head);
    if (at === null) { down = false; continue; }
    if (down) brush.lineTo(path.x(step), path.y(at + aside));
    else brush.moveTo(path.x(step), path.y(at + aside));
    down = true;
  }
  brush.stroke();
}

function paintPath() {
  const { brush } = path;
  blit(brush, path.base);
  const x = path.x(view.step), at = strongestAt(view.step);
  brush.fillStyle = inkOf("accent");
  brush.globalAlpha = 0.45;
  brush.fillRect(x - 0.75, path.top, 1.5, path.height);
  brush.globalAlpha = 1;
  if (at !== null) dot(brush, x, path.y(at), 5);
  if (view.position === null) return;
  brush.fillStyle = inkOf("ink");
  brush.globalAlpha = 0.35;
  brush.fillRect(path.left, path.y(view.position) - 0.5, path.width, 1);
  brush.globalAlpha = 1;
}

const pathStep = (event) => clamp(Math.round(((placeIn(event)[0] - path.left) / path.width) * (T - 1)), 0, T - 1);

function pathReadout(step) {
  const at = strongestAt(step), line = byId("path-readout");
  if (at === null) return write(line, "step ", strong(info.steps[step]), ": no strongest key, all attention is zero");
  write(line, "step ", strong(info.steps[step]), ": position ", strong(numberOf(at)), " ", quoted(textAt(step, at)), ", ", strong(short(scoreAt(step, at))));
}

// ---- all figures

function drawPointer() {
  paintHeat();
  paintPath();
}

function listenFigures() {
  const heatmap = byId("heat"), map = byId("grid"), line = byId("path");
  for (const kind of ["pointermove", "pointerdown"]) {
    heatmap.addEventListener(kind, (event) => pointHeat(...heatCell(event)));
    map.addEventListener(kind, (event) => { const cell = gridCell(event); if (inGrid(cell)) gridReadout(...cell); });
    line.addEventListener(kind, (event) => pathReadout(pathStep(event)));
  }
  map.addEventListener("pointerleave", () => gridReadout(view.layer, view.head));
  heatmap.addEventListener("click", (event) => { play(false); goTo(heatCell(event)[0]); });
  line.addEventListener("click", (event) => { play(false); goTo(pathStep(event)); });
  map.addEventListener("click", (event) => { const cell = gridCell(event); if (inGrid(cell)) choose(...cell); });
  heatmap.addEventListener("keydown", heatKey);
  map.addEventListener("keydown", gridKey);
  let last = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== last) { last = innerWidth; drawChoice(); drawCircuitsSoon(); } });
  dark.addEventListener("change", drawChoice);
}
