// The state of the lab: run A, run B, the changes between them, and how a run gets onto the page.
//
// A is the reference. B is A's request with the changes that are switched on. Events of all runs arrive in `onEvent`;
// only A and B are drawn.

const lab = {
  session: null, runs: new Map(), // id -> summary
  requests: new Map(), opened: new Map(), live: new Map(), // id -> request, finished run, run under way
  trials: new Map(), // id -> effects of its heads
  leaving: new Map(), // id -> timer of a deletion that can still be undone
  words: new Map(), // token id -> text
  A: null, B: null, shown: "A", chips: [], refused: null, pair: null, fresh: true, following: true, sent: 0, drawn: 0,
};

const ACTIVE = ["queued", "running"];
const summaryOf = (id) => lab.runs.get(id) || {};
const isActive = (id) => ACTIVE.includes(summaryOf(id).status);
const shownId = () => lab[lab.shown];
const modelOf = (id) => lab.session.models.find(({ name }) => name === summaryOf(id).model) || lab.session.models[0];

const learnWords = (words) => { for (const [token, text] of Object.entries(words || {})) lab.words.set(Number(token), text); };

// Calls that can fail say so on the page.
const attempt = (act) => async (...given) => {
  try { return await act(...given); } catch (error) { return complain(error); }
};

// An error of a change is shown at the change.
function complain(error) {
  if (lab.chips.some(({ id }) => id === error.chip)) refuseChip(error.chip, error.message);
  else fail(error);
}

// ---- starting runs

async function post(body) {
  byId("trouble").hidden = true;
  lab.following = false;
  refuseChip(null);
  const { run: id } = await askJson("/api/runs", body);
  lab.requests.set(id, body);
  if (!lab.runs.has(id)) lab.runs.set(id, { id, model: body.model, status: "queued", prompt: body.prompt || "", text: "" });
  return id;
}

async function runA() {
  started();
  const id = await post(requestOfForm());
  setA(id);
  view.wish = null;
  lab.again = lab.chips.some(({ on }) => on);
  present();
  runAgain(); // its last event may have arrived before its id
}

// Run B begins when run A has ended; without a run A, the form's is run first.
async function runB() {
  if (!lab.A) { await runA(); lab.again = true; runAgain(); return undefined; }
  if (isActive(lab.A)) { lab.again = true; drawState(); return undefined; }
  const mine = ++lab.sent, before = lab.B;
  if (before && isActive(before)) askJson(`/api/runs/${before}/cancel`, {}).catch(() => {});
  const other = byId("model-b").value, request = await requestOf(lab.A);
  const replay = byId("same").checked && other === "" ? lab.A : null;
  const body = { ...request, chips: lab.chips, replay, compare_to: lab.A };
  if (other) Object.assign(body, { model: other, settings: {}, sampler: null, cache: null });
  const id = await post(body);
  if (mine !== lab.sent) return undefined;
  Object.assign(lab, { B: id, shown: "B", pair: null });
  return present();
}

// Runs B once A has ended, if it was asked for before.
function runAgain() {
  if (!lab.again || isActive(lab.A)) return;
  lab.again = false;
  if (summaryOf(lab.A).status !== "done") return; // no run B of a run A that was stopped or failed
  attempt(runB)();
}

async function requestOf(id) {
  if (!lab.requests.has(id)) lab.requests.set(id, requestOfSpec((await askJson(`/api/runs/${id}`)).spec));
  return lab.requests.get(id);
}

function setA(id) {
  Object.assign(lab, { A: id, B: null, shown: "A", pair: null });
  lab.sent++;
  drawFolds();
}

const halt = async () => Promise.all([lab.A, lab.B].filter((id) => id && isActive(id)).map((id) => askJson(`/api/runs/${id}/cancel`, {})));

// Whether a run has been asked for that has no id yet.
const pending = (on) => { document.body.dataset.pending = on ? "1" : ""; };

// The changes are different now.
function changed() {
  drawChips();
  keep();
  if (!byId("auto").checked || !lab.A) return;
  clearTimeout(lab.soon);
  pending(false);
  if (!lab.chips.some(({ on }) => on) && byId("model-b").value === "") return dropB();
  pending(true);
  lab.soon = setTimeout(async () => { await attempt(runB)(); pending(false); }, 20);
}

function dropB() {
  Object.assign(lab, { B: null, shown: "A", pair: null });
  lab.sent++;
  present();
}

// ---- showing runs

// The run of this id as the figures read it, or null if it has no step yet.
async function opened(id) {
  if (lab.opened.has(id)) return lab.opened.get(id);
  if (isActive(id) && lab.live.has(id)) return lab.live.get(id);
  const given = await askJson(`/api/runs/${id}`);
  if (!lab.runs.has(id)) lab.runs.set(id, given.summary); // otherwise the events are newer
  lab.requests.set(id, requestOfSpec(given.spec));
  learnWords(given.tokens);
  learnTrial(given.heads);
  if (lab.live.has(id)) return lab.live.get(id);
  if (given.data) {
    lab.opened.set(id, finishedRun(id, given.data));
    lab.live.delete(id);
    if (lab.opened.size > 12) lab.opened.delete([...lab.opened.keys()].find((other) => other !== lab.A && other !== lab.B));
    return lab.opened.get(id);
  }
  if (!given.canvas || !isActive(id)) return null;
  const live = liveRun(id, { positions: given.canvas[0].length, prompt_length: given.prompt_length, canvas: given.canvas[0], tokens: given.tokens }, modelOf(id));
  missedEvents(given).forEach(live.add);
  lab.live.set(id, live);
  return live;
}

// A run with the scores of the layer that will be shown: figures that are pointed at read them at once.
async function withLayer(of) {
  const { layer } = chosen();
  await of?.load(of.held.includes(layer) ? layer : ALL);
  return of;
}

// Puts the run that should be shown onto the page, and the comparison if there are two.
const present = attempt(async () => {
  drawState();
  const id = shownId();
  if (!id) return;
  const wanted = (lab.wanted = id), next = await opened(id).then(withLayer).catch((error) => {
    if (lab.wanted === wanted) byId("results").hidden = true; // not the figures of another run under its name
    throw error;
  });
  if (lab.wanted !== wanted || !next || next.info.steps.length === 0) return;
  await show(next);
  await compare();
  keep();
});

async function show(next) {
  const first = byId("results").hidden, different = run !== next;
  byId("results").hidden = false;
  byId("bar").hidden = false;
  const same = run && summaryOf(run.id).model === summaryOf(next.id).model && run.info.positions === next.info.positions && !next.live && !run.live && run.id !== next.id;
  useRun(next);
  view.step = Math.min(view.wish ?? T - 1, T - 1);
  const there = ({ layer, head }) => has(layer) && layer < L && head < H;
  if (!there(view)) Object.assign(view, { layer: ALL, head: ALL });
  if (!there(chosen())) view.coming = null;
  if (view.position !== null && view.position >= P) view.position = null;
  fillControls();
  fillTokens();
  fillScope();
  drawTrial();
  if (different) shown.asked = null;
  if (different && !same) clearAttention("");
  const start = lab.fresh && !next.live && next.info.start;
  if (start) lab.fresh = false;
  if (start) await choose(...next.info.start);
  else await choose();
  if (run !== next) return; // another run has been shown in the meantime
  if (different || first) startAttention();
  listProposals();
  drawColor();
  checkLens();
  said(next);
  if (!next.live) timed("done");
}

// A step of the run on the page has arrived.
function grow() {
  Object.assign(lab, { drawing: null, drawn: performance.now() });
  const next = lab.live.get(shownId());
  if (!next || !next.info.steps.length) return;
  if (next.info.steps.length === 1 || run !== next) timed("first-step");
  if (run !== next) { present(); return; }
  useRun(next);
  byId("step").max = T - 1;
  for (const name of ["step", "step-number", "play", "back", "forward"]) byId(name).disabled = T < 2;
  view.step = Math.min(view.wish ?? T - 1, T - 1);
  choose();
  said(next);
}

// Records what is shown, for scripts that wait for it.
const said = ({ id, live }) => Object.assign(document.body.dataset, { shown: `${id}/${live ? "live" : "done"}`, steps: T });

// ---- events

const HANDLERS = {
  queued({ run: id, summary }) {
    lab.runs.set(id, summary);
    if (lab.following) follow(summary);
  },
  started(event) {
    lab.runs.set(event.run, { ...summaryOf(event.run), status: "running", steps: event.steps });
    learnWords(event.tokens);
    lab.live.set(event.run, liveRun(event.run, event, modelOf(event.run)));
  },
  step(event) {
    const live = lab.live.get(event.run);
    if (!live) return;
    learnWords(event.tokens);
    live.add(event);
    lab.runs.set(event.run, { ...summaryOf(event.run), steps_run: event.step + 1, left: event.left });
    if (event.run === shownId()) lab.drawing ??= setTimeout(() => requestAnimationFrame(grow), Math.max(0, 60 - (performance.now() - lab.drawn)));
  },
  done: ended, cancelled: ended, failed: ended, heads: learnTrial,
  removed({ run: id }) {
    for (const store of [lab.runs, lab.opened, lab.live, lab.requests, lab.trials]) store.delete(id);
    if (id === lab.B) dropB();
    if (id === lab.A) setA(lab.B);
  },
};

function ended(event, status) {
  lab.runs.set(event.run, { ...summaryOf(event.run), status, ...(event.summary || {}), ...(event.error ? { error: event.error } : {}) });
  lab.live.delete(event.run);
  if (event.run !== lab.A && event.run !== lab.B) return;
  if (event.error) fail(new Error(event.error));
  if (status === "failed" && !summaryOf(event.run).steps_run && event.run === lab.B) { lab.B = null; lab.shown = "A"; }
  if (event.run === lab.A) {
    if (status === "done") for (const name of ["form", "changes"]) fold(name, true);
    runAgain();
  }
  present();
}

// A tab in which nothing has been run yet shows what the other tabs run.
function follow(summary) {
  if (summary.compare_to && lab.runs.has(summary.compare_to)) Object.assign(lab, { A: summary.compare_to, B: summary.id, shown: "B", pair: null });
  else Object.assign(lab, { A: summary.id, B: null, shown: "A", pair: null });
  return attempt(adopt)(summary.id);
}

// The changes of a run and the form of run A, in this tab.
async function adopt(id) {
  const request = await requestOf(id), first = await requestOf(lab.A);
  lab.chips = (request.chips || []).map((chip) => ({ ...chip }));
  fillForm(first);
  byId("same").checked = Boolean(request.replay);
  byId("model-b").value = request.model === first.model ? "" : request.model;
  drawChips();
  await present();
}

function onEvent(kind, event) {
  HANDLERS[kind](event, kind);
  if (kind === "heads") return;
  if (kind !== "step" || [lab.A, lab.B].includes(event.run)) drawState();
  if (kind !== "step") drawHistory();
}

function listenEvents(since) {
  const restored = attempt(reload), receive = attempt((kind, event) => (kind === "reset" ? restored() : onEvent(kind, event)));
  const lost = (error) => { byId("state").textContent = error && error.status ? error.message : "The connection to the lab is interrupted; it is being restored."; };
  followEvents(since, { receive, lost, opened: drawState });
}

// After the server has lost its place in the events: what is there now.
async function reload() {
  lab.session = await askJson("/api/session");
  lab.runs = new Map(lab.session.runs.map((summary) => [summary.id, summary]));
  for (const slot of ["A", "B"]) if (lab[slot] && !lab.runs.has(lab[slot])) lab[slot] = null;
  if (lab.A) learnTrial((await askJson(`/api/runs/${lab.A}`)).heads);
  drawHistory();
  drawState();
  present();
}
