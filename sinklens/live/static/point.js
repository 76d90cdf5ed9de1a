// Pointing at the figures: what can be changed at a head, a position, a key or a path.

const stepNow = () => info.steps[view.step];
const headNow = () => view.layer !== ALL && view.head !== ALL;
const headSaid = (layer, head) => `layer ${layer}, head ${head}`;

// What masking acts on: a head's strongest keys, which are sinks only if the page shows a sink at this step.
const anySink = (test) => Array.from({ length: P }, (_, at) => exists(view.step, at) && test(at)).some(Boolean);
const keysSaid = (layer, head) => (layer === view.layer && anySink((at) => isSink(view.step, at, layer, head)) ? "sinks" : "strongest keys");

function headItems(layer, head) {
  const own = { layer, head }, when = whenSaid();
  return [
    [`Ablate ${headSaid(layer, head)} (zero), ${when}`, () => addChip("ablate_head", { ...own, by: "zero" })],
    [`Ablate ${headSaid(layer, head)} (mean), ${when}`, () => addChip("ablate_head", { ...own, by: "mean" })],
    [`Mask its ${keysSaid(layer, head)}, ${when}`, () => addChip("mask_head_sinks", own)],
    ...pathItems(layer, head),
    [`Ablate further heads of layer ${layer}…`, () => editChip(newChip("ablate_heads", { layer, heads: [head] }))],
    ...layerItems(layer),
  ];
}

function layerItems(layer) {
  const when = whenSaid();
  return [
    [`Ablate all heads of layer ${layer}, ${when}`, () => addChip("ablate_heads", { layer, heads: null })],
    [`Ablate the MLP of layer ${layer}, ${when}`, () => addChip("ablate_mlp", { layer })],
  ];
}

function pathItems(layer, head) {
  const from_step = firstKept();
  return [
    [`Freeze the pattern of ${headSaid(layer, head)} from step ${from_step} on`, () => addChip("freeze_pattern", { layer, head, from_step })],
    [`Hold the sink of ${headSaid(layer, head)} still from step ${from_step} on`, () => addChip("hold_sink", { layer, head, from_step })],
  ];
}

function positionItems(pos) {
  const keys = [[null, null, "all heads"]];
  if (view.layer !== ALL) keys.unshift([view.layer, null, `layer ${view.layer}`]);
  if (headNow()) keys.unshift([view.layer, view.head, headSaid(view.layer, view.head)]);
  return [
    [`Read position ${pos} layer by layer`, () => readLens(pos)],
    [`Force a token here, ${whenSaid()}…`, () => editChip(newChip("force_token", { pos }))],
    ...keys.map(([layer, head, who]) => [`Hide position ${pos} from ${who}, ${whenSaid()}`, () => addChip("hide_key", { pos, layer, head })]),
    ...(pos < info.prompt_positions ? [] : [[`Remask position ${pos} at step ${stepNow()}`, () => addChip("remask", { pos, step: stepNow() })]]),
  ];
}

// What can be changed at a head; from the button or a key also what can be changed in all heads.
function headMenu(event, layer = chosen().layer, head = chosen().head, pointed = false) {
  const one = layer !== ALL && head !== ALL, all = allHeadItems();
  openMenu(...placeOf(event, byId("grid")), one ? headSaid(layer, head) : "Click a head for its own changes.", [...(one ? headItems(layer, head) : []), ...(pointed ? all.slice(0, 2) : [...all, ...(one || layer === ALL ? [] : layerItems(layer))])]);
}

function positionMenu(event, pos, node = byId("tokens")) {
  view.position = pos;
  openMenu(...placeOf(event, node), `position ${pos}, step ${stepNow()}`, positionItems(pos));
}

function pathMenu(event) {
  if (!headNow()) return headMenu(event);
  return openMenu(...placeOf(event, byId("path")), headSaid(view.layer, view.head), [...pathItems(view.layer, view.head), [`Mask its ${keysSaid(view.layer, view.head)}, ${whenSaid()}`, () => addChip("mask_head_sinks", { layer: view.layer, head: view.head })]]);
}

// ---- proposals for an undecided position

async function listProposals() {
  const list = byId("proposals"), pos = lab.asked, id = shownId();
  const open = run && pos !== undefined && pos !== null && pos < P && !run.live && data.entered[view.step * P + pos] === MASK;
  list.hidden = !open;
  if (!open) return;
  const wanted = (lab.proposing = `${id}/${view.step}/${pos}`);
  if (list.dataset.of !== wanted) write(list); // not those of another place
  let proposals;
  try {
    ({ proposals } = await askJson(`/api/runs/${id}/proposals?step=${stepNow()}&pos=${pos}`));
  } catch (error) {
    if (lab.proposing === wanted) write(list, make("li", `No proposals: ${error.message}`, "why"));
    return;
  }
  if (lab.proposing !== wanted) return;
  list.dataset.of = wanted;
  learnWords(Object.fromEntries(proposals.map(({ id: token, text }) => [token, text])));
  write(list, ...proposals.map(({ id: token, text, p }) => {
    const item = make("li"), bar = make("span", undefined, "bar-of"), fill = make("i");
    fill.style.width = `${100 * p}%`;
    bar.append(fill, make("bdi", text));
    item.append(bar, make("span", p.toFixed(3), "value"), button("Force", `Force ${text} at position ${pos}, ${whenSaid()}`, () => addChip("force_token", { pos, token })));
    return item;
  }));
}

function ask_at(pos, event) {
  point(pos);
  lab.asked = pos;
  listProposals();
  if (event) positionMenu(event, pos);
}

// ---- the events of the figures

function headAt(event) {
  const cell = gridCell(event);
  return inGrid(cell) ? cell : null;
}

// The head whose path is nearest to the pointer.
function nearestPath(event) {
  const step = pathStep(event), y = placeIn(event)[1];
  let best = null, least = 14;
  for (let layer = 0; layer < L; layer++) {
    for (let head = 0; head < H; head++) {
      const pos = strongestAt(step, layer, head), far = pos === null ? Infinity : Math.abs(path.y(pos) - y);
      if (far < least) [best, least] = [[layer, head], far];
    }
  }
  return best;
}

function keyOf(event) {
  const [x] = placeIn(event);
  return clamp(Math.floor((x - LEFT) / shown.cell), 0, shown.side - 1);
}

// Moving the pointer over rows with the button held chooses a range of steps.
function listenRange() {
  let from = null;
  byId("heat").addEventListener("pointerdown", (event) => { from = event.button === 0 && event.pointerType === "mouse" ? heatCell(event)[0] : null; });
  byId("heat").addEventListener("pointermove", (event) => { if (from !== null && event.buttons && Math.abs(heatCell(event)[0] - from) > 1) setRange(from, heatCell(event)[0]); });
  addEventListener("pointerup", () => { from = null; });
}

function arrowPoint(event) {
  const to = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 }[event.key], now = view.position ?? info.prompt_positions;
  if (to) ask_at(clamp(now + to, 0, P - 1));
  else if (event.key === "Enter" || event.key === "m") positionMenu(null, now);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function keyMenu(act) {
  return (event) => {
    if (event.key !== "m" && !(event.key === "Enter" && event.currentTarget.id !== "heat")) return;
    act(event);
    event.preventDefault();
    event.stopPropagation();
  };
}

function changeButton(card, text, act) {
  const node = button(text, `${text} (m)`, act);
  node.classList.add("change");
  document.querySelector(`.card.${card} .head`).append(node);
}

function listenPoints() {
  const list = make("ol", undefined, "proposals");
  list.id = "proposals";
  list.setAttribute("aria-label", "Proposals for the undecided position");
  byId("token-readout").after(list);
  Object.assign(byId("tokens"), { tabIndex: 0, role: "application" });
  byId("tokens").setAttribute("aria-label", "Canvas. Arrow keys choose a position; Enter lists what can be changed there.");
  for (const name of ["path", "pattern"]) Object.assign(byId(name), { tabIndex: 0 });
  byId("tokens").addEventListener("click", (event) => { const token = event.target.closest(".tok"); if (token) ask_at(Number(token.dataset.at), event); });
  byId("tokens").addEventListener("keydown", arrowPoint);
  byId("grid").addEventListener("click", (event) => { const cell = headAt(event); if (cell) headMenu(event, ...cell, true); });
  byId("grid").addEventListener("keydown", keyMenu(() => headMenu(null)));
  byId("heat").addEventListener("keydown", keyMenu(() => positionMenu(null, view.position ?? 0, byId("heat"))));
  byId("heat").addEventListener("contextmenu", (event) => { event.preventDefault(); positionMenu(event, heatCell(event)[1], byId("heat")); });
  byId("path").addEventListener("keydown", keyMenu(() => pathMenu(null)));
  byId("path").addEventListener("contextmenu", (event) => { event.preventDefault(); pathMenu(event); });
  byId("path").addEventListener("dblclick", (event) => { const head = nearestPath(event); if (head) choose(...head); });
  byId("pattern").addEventListener("click", (event) => { if (shown.map) positionMenu(event, keyOf(event), byId("pattern")); });
  byId("pattern").addEventListener("keydown", keyMenu(() => positionMenu(null, view.position ?? 0, byId("pattern"))));
  changeButton("grid", "Change heads…", (event) => headMenu(event));
  changeButton("canvas", "Change position…", (event) => positionMenu(event, view.position ?? info.prompt_positions));
  changeButton("path", "Change path…", (event) => pathMenu(event));
  byId("path-readout").textContent = "Hover over a step. Double-click a gray path to choose its head.";
  listenRange();
}
