// Opens the lab: the session, the events, the keys.

const SHORTCUTS = {
  b: attempt(runB), s: attempt(halt), c: attempt(copyPython), "?": () => openDialog("help"),
  1: () => showSlot("A"), 2: () => showSlot("B"), x: () => showSlot(other(lab.shown)),
  Escape: () => document.querySelector("dialog[open]")?.close(),
  p: () => { fold("form", false); byId("prompt").focus(); }, n: () => { fold("changes", false); byId("add-kind").focus(); }, g: () => byId("grid").focus(), t: () => byId("tokens").focus(), h: () => byId("heat").focus(), a: () => byId("pattern").focus(),
};

function onShortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, textarea, dialog[open], [role=menu], input:not([type=range]):not([type=checkbox])")) return;
  const act = SHORTCUTS[event.key];
  if (!act) return;
  act();
  event.preventDefault();
}

async function startLab() {
  lab.session = await askJson("/api/session");
  lab.runs = new Map(lab.session.runs.map((summary) => [summary.id, summary]));
  byId("bar").hidden = true;
  listenControls();
  listenTokens();
  listenFigures();
  listenAttention();
  listenMenu();
  listenForm();
  listenChips();
  listenPoints();
  listenTrial();
  listenCompare();
  listenOutput();
  listenColor();
  listenLens();
  listenExport();
  for (const slot of ["A", "B"]) byId(`show-${slot}`).addEventListener("click", () => showSlot(slot));
  byId("history-filter").addEventListener("input", drawHistory);
  byId("pin").addEventListener("click", attempt(pin));
  document.addEventListener("keydown", onShortcut);
  document.addEventListener("pointerup", () => keep());
  byId("bar").addEventListener("change", () => keep());
  fillModels();
  drawChips();
  drawHistory();
  drawState();
  listenEvents(lab.session.event ?? 0);
  await attempt(restore)();
  document.body.dataset.ready = "1";
}

startLab().catch(fail);
