// What differs between run A and run B, in words: the tiles below the A/B switch, the positions, the sinks of each.

const MOST_PLACES = 64, SINKS = 5;
const twoModels = () => summaryOf(lab.A).model !== summaryOf(lab.B).model;
const meanOf = (values) => { const known = (values || []).filter((value) => value !== null && value !== undefined); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };

// The step that decided a position, as the run numbers it; null: none did.
function decidedAt(of, pos) {
  for (let step = of.info.steps.length - 1; step >= 0; step--) if (of.data.committed[step * of.info.positions + pos]) return of.info.steps[step];
  return null;
}

function finalToken(of, pos) {
  return of.info.vocabulary[of.data.left[(of.info.steps.length - 1) * of.info.positions + pos]];
}

// The first words of two answers that differ, as "12 → 14"; empty if one answer only continues the other.
function changedWords([a, b]) {
  const words = (a || "").split(/\s+/).filter(Boolean), others = (b || "").split(/\s+/).filter(Boolean), at = words.findIndex((word, place) => word !== others[place]);
  return at < 0 || at >= others.length ? "" : `${words[at]} → ${others[at]}`;
}

// ---- the tiles below the switch

function stepLink(step) {
  const node = button(`step ${step}`, `Go to step ${step}`, () => goTo(step));
  node.classList.add("link");
  return node;
}

const small = (value) => (value < 0.01 && value > 0 ? value.toExponential(1) : short(value));
const tile = (value, label) => { const node = make("span", undefined, "tile"), big = make("b"); write(big, ...[value].flat()); node.append(big, " ", make("span", label)); return node; };

// The mean divergences, that on A's canvases first: it is the change of each step alone.
function divergenceTiles({ kl, kl_free: free, kl_why: why, measuring }) {
  if (measuring) return [tile("…", "KL is being measured")];
  return [[kl, "mean KL on A's canvases"], [summaryOf(lab.B).replay ? null : free, "mean KL free-running"]]
    .map(([values, label]) => [meanOf(values), label]).filter(([mean]) => mean !== null && !why).map(([mean, label]) => tile(`${small(mean)} nats`, label));
}

// Whether the answer changed: the numbers after ####, if both answers state one, else the first words that differ.
function answerTile({ texts: [a, b], numbers: [one, two], first_difference: first, right }) {
  const judged = right && right.some((known) => known !== null) ? `: A ${right[0] ? "✓ right" : "✗ wrong"}, B ${right[1] ? "✓ right" : "✗ wrong"}` : "", words = changedWords([a, b]);
  if (a === b) return tile("same answer", (first ?? null) === null ? "every canvas is the same" : `text of the answer${judged}`);
  if (one !== null && two !== null) return tile(one === two ? one : `${one} → ${two}`, `${one === two ? "only the text changed; " : ""}number after ####${judged}`);
  return tile(words ? quoted(words) : "changed", `text of the answer${judged}`);
}

function verdictTiles(pair) {
  const { first_difference: first, sinks_moved: moved } = pair, share = meanOf(moved), [onA, ...free] = divergenceTiles(pair), tiles = [onA, answerTile(pair)];
  if ((first ?? null) !== null) tiles.push(tile(stepLink(first), "first difference of the canvases"));
  if (twoModels()) tiles.push(...placesTiles(pair));
  else if (share !== null) tiles.push(tile(`${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`, "of heads have another strongest key"));
  return [...tiles, ...free].filter(Boolean);
}

function drawVerdict(why = "") {
  const line = byId("verdict"), { B, pair } = lab, ready = pair && pair.key === `${lab.A}/${B}` && pair.a.differs;
  line.hidden = !B;
  if (!B) return;
  line.dataset.pair = ready && !pair.measuring ? pair.key : "";
  if (why) { line.textContent = why; return; }
  if (!ready) { line.textContent = isActive(B) ? "Run B is under way…" : "Comparing A and B…"; return; }
  const more = button("Details", "Details of A beside B", () => { byId("compare").scrollIntoView({ block: "start" }); byId("compare-title").focus({ preventScroll: true }); });
  more.classList.add("link");
  write(line, make("span", "B beside A", "name"), ...verdictTiles(pair), more);
}

// ---- the positions that differ

function placesOfPair({ a, b }) {
  const shift = b.info.prompt_positions - a.info.prompt_positions, found = [];
  for (let pos = a.info.prompt_positions; pos < a.info.positions && pos + shift < b.info.positions; pos++) {
    const row = { pos, tokens: [finalToken(a, pos), finalToken(b, pos + shift)], steps: [decidedAt(a, pos), decidedAt(b, pos + shift)] };
    row.token = row.tokens[0] !== row.tokens[1];
    row.step = row.steps[0] !== row.steps[1];
    if (row.token || row.step) found.push(row);
  }
  return found;
}

const countsOf = (places) => [places.filter(({ token }) => token).length, places.filter(({ step }) => step).length];

function placesTiles(pair) {
  const [tokens, steps] = countsOf(placesOfPair(pair));
  return [tile(tokens, "positions end with another token"), tile(steps, "are decided at another step")];
}

function drawPlaces(pair) {
  const places = placesOfPair(pair), [tokens, steps] = countsOf(places);
  byId("places-said").textContent = `Of ${count(pair.a.info.positions - pair.a.info.prompt_positions, "position")} of the answer, ${tokens} end with another token and ${steps} are decided at another step.`;
  const stepCell = (step) => { const cell = make("td"); cell.append(step === null ? "–" : stepLink(step)); return cell; };
  write(byId("places").tBodies[0], ...places.slice(0, MOST_PLACES).map(({ pos, tokens: [one, two], steps: [first, second], token }) => {
    const row = make("tr"), cells = [one, two].map((text) => { const cell = make("td"), word = quoted(text || "…"); word.className = token ? "tok differs" : "tok"; cell.append(word); return cell; });
    row.append(make("td", pos), cells[0], stepCell(first), cells[1], stepCell(second));
    return row;
  }));
}

// ---- the sinks of each run

// Positions by the number of heads in which they are a sink, mean over steps, and the mean number of moves of a head.
function sinkSummary(of) {
  const { steps: { length: T }, positions: P, layers: L, heads: H, vocabulary } = of.info, heads = L * H, columns = 1 + L + heads;
  const mean = Array.from({ length: P }, (_, at) => { let sum = 0; for (let step = 0; step < T; step++) sum += of.data.heads[step * P + at]; return sum / T; });
  let moved = 0;
  for (let step = 1; step < T; step++) for (let head = 0; head < heads; head++) moved += of.data.path[step * columns + 1 + L + head] !== of.data.path[(step - 1) * columns + 1 + L + head];
  const top = mean.map((value, at) => [at, value]).filter(([, value]) => value > 0).sort((one, two) => two[1] - one[1]).slice(0, SINKS);
  return { heads, moves: moved / heads, top: top.map(([at, value]) => ({ at, value, text: vocabulary[of.data.left[(T - 1) * P + at]] })) };
}

function drawSinks(slot, of) {
  const { heads, moves: each, top } = sinkSummary(of), title = make("li", `Sinks: in how many of the ${heads} heads, mean over steps. A head's strongest key moves ${short(each)} times.`, "name");
  write(byId(`sinks-${slot}`), title, ...top.map(({ at, value, text }) => {
    const item = make("li"), bar = make("span", undefined, "bar-of"), fill = make("i"), word = make("bdi", text || "…");
    fill.style.width = `${(100 * value) / heads}%`;
    bar.append(fill, word);
    item.append(make("span", `position ${of.info.first + at}`, "soft"), bar, make("span", short(value), "value"));
    return item;
  }), top.length ? null : make("li", "No position is a sink.", "soft"));
}

function drawDifferences(pair) {
  drawPlaces(pair);
  drawSinks("A", pair.a);
  drawSinks("B", pair.b);
}
