// Changes: a list of chips, each one intervention, which can be switched off, edited, duplicated and removed.

const kindOf = (kind) => lab.session.chips.find((known) => known.kind === kind) || { kind, label: kind, help: "", fields: [] };
const newId = () => `c${Date.now().toString(36)}${Math.floor(Math.random() * 1e6).toString(36)}`;
const lastStep = () => (run ? T - 1 : 0);

// Start of a measurement, see `timed`.
function started() {
  performance.clearMarks("chip");
  performance.mark("chip");
}

// ---- the steps that new changes apply to

// null: all steps; otherwise the first and the last one.
function scopeSteps() {
  const now = run ? info.steps[view.step] : 0;
  return { all: () => null, one: () => [now, now], on: () => [now, lastStep()], range: () => [Number(byId("scope-from").value), Number(byId("scope-to").value)] }[byId("scope").value]();
}

// The step that is kept in later ones: the first of those chosen, but none follows the last.
const firstKept = () => { const [first] = scopeSteps() ?? [0]; return first < lastStep() ? first : 0; };

function fillScope() {
  for (const name of ["scope-from", "scope-to"]) byId(name).max = lastStep();
  if (Number(byId("scope-to").value) === 0) byId("scope-to").value = lastStep();
  drawScope();
}

function drawScope() {
  const range = byId("scope").value === "range", steps = scopeSteps();
  byId("scope-range").hidden = !range;
  byId("scope-said").textContent = ["one", "on"].includes(byId("scope").value) ? stepsSaid(steps) : "";
}

function setRange(from, to) {
  byId("scope").value = "range";
  byId("scope-from").value = clamp(Math.min(from, to), 0, lastStep());
  byId("scope-to").value = clamp(Math.max(from, to), 0, lastStep());
  drawScope();
}

// ---- the list

// A new change; what `given` leaves open comes from the steps chosen and the defaults of its kind.
function newChip(kind, given = {}) {
  const steps = scopeSteps(), chip = { id: newId(), on: true, kind };
  for (const { name, default: usual } of kindOf(kind).fields) chip[name] = usual ?? null;
  if ("steps" in chip) chip.steps = steps;
  if ("from_step" in chip) chip.from_step = firstKept();
  if ("step" in chip) chip.step = run ? info.steps[view.step] : 0;
  for (const part of ["layer", "head"]) if (part in chip && chosen()[part] !== ALL) chip[part] = chosen()[part];
  if ("pos" in chip && view.position !== null) chip.pos = view.position;
  return { ...chip, ...given };
}

function addChip(kind, given) {
  started();
  lab.chips.push(newChip(kind, given));
  changed();
}

function stepsSaid(steps) {
  if (steps === null || steps === undefined) return "all steps";
  if (steps[0] === steps[1]) return `step ${steps[0]}`;
  return run && steps[1] >= lastStep() ? `from step ${steps[0]} on` : `steps ${steps[0]}–${steps[1]}`;
}
const whenSaid = () => stepsSaid(scopeSteps());

function saidOf(chip) {
  const parts = kindOf(chip.kind).fields.filter(({ name }) => name !== "steps").map(({ name, label, optional }) => {
    const value = chip[name];
    if (value === null || value === undefined || value === "") return optional ? `all ${name.replace("pos", "position").replace(/s?$/, "s")}` : "";
    if (name === "heads" && value) return `heads ${value.join(", ")}`;
    if (typeof value === "string" && value.length > 24) return `${name} “${value.slice(0, 24)}…”`;
    if (name === "token") return `token ${lab.words.get(value) ?? `#${value}`}`;
    return `${label || { pos: "position", from_step: "from step", step: "at step", top_k: "top" }[name] || name.replaceAll("_", " ")} ${value}`;
  });
  const steps = kindOf(chip.kind).fields.some(({ name }) => name === "steps") ? stepsSaid(chip.steps) : "";
  return [kindOf(chip.kind).label, [...parts, steps].filter(Boolean).join(", ")].filter(Boolean).join(": ");
}

function button(text, title, act) {
  const node = make("button", text);
  Object.assign(node, { type: "button", title });
  node.setAttribute("aria-label", title);
  node.addEventListener("click", act);
  return node;
}

function drawChips() {
  write(byId("chips"), ...lab.chips.map((chip) => {
    const item = make("li", undefined, "chip"), label = make("label"), box = make("input"), text = saidOf(chip);
    Object.assign(box, { type: "checkbox", checked: chip.on });
    box.addEventListener("change", () => { started(); chip.on = box.checked; changed(); });
    label.append(box, make("span", text, "said"));
    item.append(label, button("Edit", `Edit: ${text}`, () => editChip(chip)),
      button("Copy", `Duplicate: ${text}`, () => { lab.chips.splice(lab.chips.indexOf(chip) + 1, 0, { ...chip, id: newId() }); changed(); }),
      button("×", `Remove: ${text}`, () => { started(); lab.chips.splice(lab.chips.indexOf(chip), 1); changed(); byId("add-chip").focus({ preventScroll: true }); }));
    item.classList.toggle("off", !chip.on);
    item.dataset.id = chip.id;
    if (lab.refused && lab.refused.id === chip.id) {
      const why = make("p", lab.refused.text, "warn");
      why.setAttribute("role", "alert");
      item.classList.add("bad");
      item.append(why);
    }
    return item;
  }));
  byId("no-chips").hidden = lab.chips.length > 0;
  drawFolds();
}

// Shows at a change why the lab refused it; null: none is refused.
function refuseChip(id, text) {
  const was = lab.refused;
  lab.refused = id && { id, text };
  if (id) fold("changes", false);
  if (was || id) drawChips();
  byId("chips").querySelector(".bad")?.scrollIntoView({ block: "nearest" });
}

// ---- one line instead of a form

function fold(name, on) {
  byId(name).classList.toggle("folded", on);
  byId(`${name}-fold`).setAttribute("aria-expanded", String(!on));
  drawFolds();
}

function drawFolds() {
  const { model, prompt, seed } = summaryOf(lab.A), on = lab.chips.filter((chip) => chip.on);
  byId("form-fold").textContent = byId("form").classList.contains("folded") ? "New run" : "Hide form";
  byId("changes-fold").textContent = byId("changes").classList.contains("folded") ? "Edit changes" : "Hide changes";
  byId("form-said").textContent = model ? `${model} · ${prompt || ""} · seed ${seed ?? 0}` : "";
  byId("changes-said").textContent = on.length ? on.map(saidOf).join("; ") : "none; click a head, a token or a pattern to add one";
}

// ---- editing one

const tokenSaid = (token) => (token === null || token === undefined ? "" : `#${token}`);
const TOKEN_HELP = "The text of one token; a space before a word is part of its token. Or #id.";

// Asks for the fields of a change; `done` gets the change. New ones are added, others replaced.
function editChip(chip, done = replaceChip) {
  const { label, help, fields } = kindOf(chip.kind), list = fields.map((one) => (one.type === "token" ? field({ ...one, help: TOKEN_HELP }, tokenSaid(chip.token)) : field(one, chip[one.name], lastStep())));
  byId("chip-dialog-title").textContent = label;
  write(byId("chip-fields"), help && make("p", help, "soft"), ...list.map(({ box }) => box));
  write(byId("token-choices"));
  const asked = list.find(({ name }) => name === "token"), choice = asked && offerTokens(asked, () => Number(list.find(({ name }) => name === "pos").read()));
  askForChange(async () => {
    const values = await Promise.all(list.map(async ({ name, read }) => [name, name === "token" ? await choice() : read()]));
    started();
    done({ ...chip, ...Object.fromEntries(values) });
  });
}

// Offers the tokens with the text that is typed, with and without a leading space; returns a function that gets the
// chosen one. Suggested is the one with a space, unless the token at the position now has none.
function offerTokens({ box, read }, position) {
  const input = box.querySelector("input"), offers = byId("token-choices");
  let known = { text: null, tokens: [], chosen: null };
  const spaceless = () => { const at = position(), word = run && at < P ? textAt(T - 1, at) : ""; return Boolean(word) && !/^[\s␣░]/.test(word); };
  const draw = () => write(offers, ...known.tokens.map((token) => {
    const node = button("", token.text.startsWith(" ") ? `the token with a leading space: “${token.text}”` : `the token “${token.text}”`, () => { known.chosen = token.id; draw(); });
    node.append(quoted(token.text.replace(/^ /, "␣")), ` #${token.id}`);
    node.setAttribute("aria-pressed", String(known.chosen === token.id));
    return node;
  }));
  async function look() {
    const text = read();
    if (text === known.text) return;
    known = { text, tokens: [], chosen: null };
    if (text === null) return draw();
    if (/^#\d+$/.test(text)) { known.chosen = Number(text.slice(1)); return draw(); }
    const { choices } = await askJson(`/api/token?model=${encodeURIComponent(summaryOf(lab.A).model || chosenModel().name)}&text=${encodeURIComponent(text)}`);
    if (read() !== text) return;
    for (const { id, text: word } of choices) lab.words.set(id, word);
    const [exact, spaced = exact] = choices;
    known = { text, tokens: choices, chosen: (spaceless() ? exact : spaced).id };
    draw();
  }
  let soon;
  input.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(() => look().catch((error) => { byId("chip-trouble").textContent = error.message; }), 150); byId("chip-trouble").textContent = ""; });
  return async () => {
    clearTimeout(soon);
    if (known.text !== read() || known.chosen === null) { known.text = undefined; await look(); }
    return known.chosen;
  };
}

// Shows the dialog of a change. It closes when `save` succeeds, and otherwise says why it failed.
function askForChange(save) {
  byId("chip-trouble").textContent = "";
  byId("chip-form").onsubmit = async (event) => {
    event.preventDefault();
    try {
      await save();
      byId("chip-dialog").close();
    } catch (error) {
      byId("chip-trouble").textContent = String(error.message || error);
    }
  };
  openDialog("chip-dialog");
  byId("chip-fields").querySelector("[data-name=token] input")?.focus(); // its position is known
}

function replaceChip(chip) {
  const at = lab.chips.findIndex(({ id }) => id === chip.id);
  lab.chips.splice(at < 0 ? lab.chips.length : at, at < 0 ? 0 : 1, chip);
  changed();
}

function listenChips() {
  write(byId("add-kind"), ...lab.session.chips.map(({ kind, label }) => option(kind, label)));
  byId("add-chip").addEventListener("click", () => editChip(newChip(byId("add-kind").value)));
  byId("chip-cancel").addEventListener("click", () => byId("chip-dialog").close());
  byId("scope").addEventListener("change", drawScope);
  for (const name of ["scope-from", "scope-to"]) byId(name).addEventListener("change", () => setRange(Number(byId("scope-from").value), Number(byId("scope-to").value)));
  for (const name of ["same", "model-b"]) byId(name).addEventListener("change", changed);
  byId("auto").addEventListener("change", () => keep());
  byId("run-b").addEventListener("click", attempt(runB));
  for (const name of ["form", "changes"]) byId(`${name}-fold`).addEventListener("click", () => fold(name, !byId(name).classList.contains("folded")));
}
