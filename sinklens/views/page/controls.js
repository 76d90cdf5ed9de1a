// The controls of a run: step, layer, head, and playing.

// The layer and head shown, or those chosen last, whose scores are still being read.
const chosen = () => view.coming ?? view;

async function choose(layer = chosen().layer, head = chosen().head) {
  if (!has(layer)) return false;
  const coming = (view.coming = { layer, head: layer === ALL ? ALL : head }), of = run;
  try {
    await run.load(layer);
  } catch (error) {
    if (view.coming === coming) Object.assign(view, { coming: null });
    for (const part of ["layer", "head"]) byId(part).value = view[part]; // what is still shown
    throw error;
  }
  if (view.coming !== coming || of !== run) return true; // the selection has changed, or another run continues with it
  Object.assign(view, coming, { coming: null });
  byId("layer").value = layer;
  byId("head").value = view.head;
  byId("head").disabled = layer === ALL;
  drawChoice();
  return true;
}

function goTo(step) {
  const before = view.step;
  view.step = clamp(step, 0, T - 1);
  view.wish = view.step === T - 1 ? null : view.step; // the step to show in another run; null: its last
  drawStep();
  if (view.step !== before) followStep();
}

// The place of a step among those shown, or of the nearest one.
const nearestIndex = (step) => info.steps.reduce((best, one, at) => (Math.abs(one - step) < Math.abs(info.steps[best] - step) ? at : best), 0);

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

const everyHead = () => [[ALL, ALL], ...run.held.flatMap((layer) => Array.from({ length: H + 1 }, (_, n) => [layer, n - 1]))];

function nextHead(by) {
  const places = everyHead(), at = chosen(), now = places.findIndex(([layer, head]) => layer === at.layer && head === at.head);
  choose(...places[(now + by + places.length) % places.length]).catch(fail);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !run || event.target.closest("select, summary, textarea, dialog[open], input:not(#step)")) return;
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

// Listens to the controls, once.
function listenControls() {
  const slider = byId("step");
  slider.addEventListener("input", () => { play(false); goTo(Number(slider.value)); });
  byId("step-number").addEventListener("change", () => { play(false); goTo(nearestIndex(Number(byId("step-number").value))); });
  byId("play").addEventListener("click", () => play(view.playing === null));
  byId("back").addEventListener("click", () => { play(false); goTo(view.step - 1); });
  byId("forward").addEventListener("click", () => { play(false); goTo(view.step + 1); });
  byId("layer").addEventListener("change", () => choose(Number(byId("layer").value)).catch(fail));
  byId("head").addEventListener("change", () => choose(undefined, Number(byId("head").value)).catch(fail));
  document.addEventListener("keydown", onKey);
}

// The range of the controls, for the run on the page.
function fillControls() {
  byId("step").max = T - 1;
  for (const id of ["step", "step-number", "play", "back", "forward"]) byId(id).disabled = T < 2;
  const layers = Array.from({ length: L }, (_, layer) => option(layer, has(layer) ? layer : `${layer} (not in this page)`, !has(layer)));
  write(byId("layer"), option(ALL, "all, mean"), ...layers);
  write(byId("head"), option(ALL, "mean"), ...Array.from({ length: H }, (_, head) => option(head, head)));
}
