// What leaves the page: the script and the report; and what the next visit finds.

const pairQuery = () => (lab.A && lab.B ? `?other=${lab.B}` : "");
const STORE = "sinklens-lab";

async function clip(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { return false; }
}

async function copyPython() {
  if (!lab.A) throw new Error("There is no run yet.");
  const text = await (await ask(`/api/runs/${lab.A}/python${pairQuery()}`)).text();
  byId("code").value = text;
  openDialog("code-dialog");
  byId("code-said").textContent = (await clip(text)) ? "Copied. It reproduces what the page shows." : "Select the text and copy it.";
  byId("code").select();
}

function stateNow() {
  const { A, B, shown: slot, chips, asked } = lab, boxes = Object.fromEntries(["same", "auto"].map((name) => [name, byId(name).checked]));
  let form = null;
  try { form = requestOfForm(); } catch { form = { model: byId("model-name").value, prompt: byId("prompt").value }; } // an unfinished form
  return { A, B, shown: slot, chips, asked: asked ?? null, step: view.step, layer: chosen().layer, head: chosen().head, color: byId("token-color").value, boxes, modelB: byId("model-b").value, form };
}

// Keeps the state in this tab, so that a reload finds it.
function keep() {
  clearTimeout(lab.keeping);
  lab.keeping = setTimeout(() => {
    sessionStorage.setItem(STORE, JSON.stringify({ state: stateNow() }));
  }, 150);
}

// The state of this tab, of the newest run, or an example to begin with.
async function restore() {
  const kept = JSON.parse(sessionStorage.getItem(STORE) || "null");
  if (kept) return apply(kept.state);
  const newest = [...lab.runs.values()].sort((a, b) => b.created - a.created)[0];
  if (newest) return follow(newest);
  if (!byId("prompt").value) byId("prompt").value = byId("source").value === "ids" ? "1, 2, 3" : lab.session.example;
  return undefined;
}

async function apply(state) {
  const there = (id) => (id && lab.runs.has(id) ? id : null), A = there(state.A), B = A ? there(state.B) : null;
  Object.assign(lab, { A, B, shown: B ? state.shown : "A", chips: state.chips || [], asked: state.asked, following: !A, fresh: !A });
  fillForm(state.form);
  for (const [name, on] of Object.entries(state.boxes || {})) byId(name).checked = on;
  byId("model-b").value = state.modelB || "";
  byId("token-color").value = state.color || "attention";
  Object.assign(view, { step: state.step, layer: state.layer, head: state.head, coming: null });
  if (A) for (const name of ["form", "changes"]) fold(name, true);
  drawChips();
  await present();
  if (run && T > state.step) goTo(state.step);
}

// Fetched first: a browser sends no header when it follows a link from a frame, and a refusal would be saved as a file.
async function savePage() {
  const { href } = byId("save-page"), link = make("a");
  if (!href) return;
  link.href = URL.createObjectURL(await (await ask(href)).blob());
  link.download = `sinklens-${shownId()}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function drawTools() {
  const save = byId("save-page"), ready = shownId() && !isActive(shownId());
  if (ready) save.href = addressOf(`/api/runs/${shownId()}/page`);
  else save.removeAttribute("href");
  save.setAttribute("aria-disabled", String(!ready));
  byId("copy-python").disabled = byId("save-picture").disabled = !lab.A;
}

const KEYS = [
  ["Ctrl Enter", "run the prompt (run A)"], ["b", "run B"], ["s", "stop after the current step"], ["1, 2, x", "show run A, run B, the other one"],
  ["← →, Home, End", "step back, forward, first, last"], ["space", "play or pause"], ["[ ]", "previous, next head"],
  ["p", "to the prompt"], ["n", "to a new change"], ["g, t, h, a", "to the heads, the canvas, step × position, the attention; arrow keys move there"],
  ["m or Enter", "there: what can be changed"], ["c", "copy as Python"], ["?", "this help"], ["Escape", "close a menu or dialog"],
];

function listenOutput() {
  byId("copy-python").addEventListener("click", attempt(copyPython));
  byId("save-page").addEventListener("click", (event) => { event.preventDefault(); attempt(savePage)(); });
  byId("help-open").addEventListener("click", () => openDialog("help"));
  for (const [keys, meaning] of KEYS) {
    const name = make("dt");
    name.append(make("kbd", keys));
    byId("keys-list").append(name, make("dd", meaning));
  }
}
