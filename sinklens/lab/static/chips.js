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

// The step that is kept in later ones: the step shown, but none follows the last, where a run that has ended is shown.
const firstKept = () => (run && view.step < T - 1 ? info.steps[view.step] : 0);

function fillScope() {
  for (const name of ["scope-from", "scope-to"]) byId(name).max = lastStep();
  if (Number(byId("scope-to").value) === 0) byId("scope-to").value = lastStep();
  drawScope();
}

function drawScope() {
  const range = byId("scope").value === "range", steps = scopeSteps();
  byId("scope-range").hidden = !range;
  byId("scope-said").textContent = steps && byId("scope").value !== "one" ? `${steps[0]}–${steps[1]}` : "";
}

function setRange(from, to) {
  byId("scope").value = "range";
  byId("scope-from").value = Math.min(from, to);
  byId("scope-to").value = Math.max(from, to);
  drawScope();
}

// ---- the list

// A new change; what `given` leaves open comes from the steps chosen and the defaults of its kind.
function newChip(kind, given = {}) {
  const steps = scopeSteps(), chip = { id: newId(), on: true, kind };
  for (const { name, default: usual } of kindOf(kind).fields) chip[name] = usual ?? null;
  if ("steps" in chip) chip.steps = steps;
  if ("from_step" in chip) chip.from_step = steps && steps[0] < lastStep() ? steps[0] : firstKept();
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

const stepsSaid = (steps) => (steps === null || steps === undefined ? "" : steps[0] === steps[1] ? `step ${steps[0]}` : `steps ${steps[0]}–${steps[1]}`);

function saidOf(chip) {
  const parts = kindOf(chip.kind).fields.filter(({ name }) => name !== "steps").map(({ name, label, optional }) => {
    const value = chip[name];
    if (value === null || value === undefined || value === "") return optional ? `all ${name.replace("pos", "position")}s` : "";
    if (name === "token") return `token ${lab.words.get(value) ?? `#${value}`}`;
    return `${label || { pos: "position", from_step: "from step", top_k: "top" }[name] || name.replaceAll("_", " ")} ${value}`;
  });
  return [kindOf(chip.kind).label, [...parts, stepsSaid(chip.steps)].filter(Boolean).join(", ")].filter(Boolean).join(": ");
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
}

// Shows at a change why the lab refused it; null: none is refused.
function refuseChip(id, text) {
  const was = lab.refused;
  lab.refused = id && { id, text };
  if (was || id) drawChips();
  byId("chips").querySelector(".bad")?.scrollIntoView({ block: "nearest" });
}

// ---- editing one

const tokenSaid = (token) => (token === null || token === undefined ? "" : `#${token}`);

// Asks for the fields of a change; `done` gets the change. New ones are added, others replaced.
function editChip(chip, done = replaceChip) {
  const { label, help, fields } = kindOf(chip.kind), list = fields.map((one) => (one.type === "token" ? field({ ...one, help: "The text of one token, or #id." }, tokenSaid(chip.token)) : field(one, chip[one.name], lastStep())));
  byId("chip-dialog-title").textContent = label;
  write(byId("chip-fields"), help && make("p", help, "soft"), ...list.map(({ box }) => box));
  openDialog(async () => {
    const values = await Promise.all(list.map(async ({ name, read }) => [name, name === "token" ? await tokenOf(read()) : read()]));
    started();
    done({ ...chip, ...Object.fromEntries(values) });
  });
}

// Shows the dialog of a change. It closes when `save` succeeds, and otherwise says why it failed.
function openDialog(save) {
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
  byId("chip-dialog").showModal();
}

// The id of a token given as its text or as #id; null if nothing is given.
async function tokenOf(given) {
  if (given === null) return null;
  if (/^#\d+$/.test(given)) return Number(given.slice(1));
  const { id, text } = await askJson(`/api/token?model=${encodeURIComponent(summaryOf(lab.A).model || chosenModel().name)}&text=${encodeURIComponent(given)}`);
  lab.words.set(id, text);
  return id;
}

function replaceChip(chip) {
  const at = lab.chips.findIndex(({ id }) => id === chip.id);
  lab.chips.splice(at < 0 ? lab.chips.length : at, at < 0 ? 0 : 1, chip);
  changed();
}

// ---- cells of the canvas that are to be different when the run continues

function editCell(at) {
  const step = info.steps[view.step];
  const one = field({ name: "token", type: "token", help: "The text of one token, or #id. Leave it empty for the mask." }, "");
  byId("chip-dialog-title").textContent = `Position ${at} when step ${step} begins`;
  write(byId("chip-fields"), one.box);
  openDialog(async () => {
    const token = (await tokenOf(one.read())) ?? modelOf(lab.A).mask_token;
    if (shownId() === lab.B) setA(lab.B);
    if (!lab.edits || lab.edits.step !== step) lab.edits = { step, cells: new Map() };
    lab.edits.cells.set(at, token);
    started();
    drawEdits();
    changed();
  });
}

function drawEdits() {
  byId("edits").hidden = !lab.edits;
  if (!lab.edits) return;
  byId("edits-title").textContent = `The canvas of run A when step ${lab.edits.step} begins`;
  write(byId("edit-list"), ...[...lab.edits.cells].map(([at, token]) => {
    const item = make("li", undefined, "chip"), said = make("span", undefined, "said");
    write(said, `position ${at}: `, quoted(token === modelOf(lab.A).mask_token ? "░" : lab.words.get(token) ?? `#${token}`));
    const label = make("label");
    label.append(said);
    item.append(label, button("×", `Leave position ${at} as it is`, () => { lab.edits.cells.delete(at); if (!lab.edits.cells.size) lab.edits = null; drawEdits(); changed(); }));
    return item;
  }));
}

function listenChips() {
  write(byId("add-kind"), ...lab.session.chips.map(({ kind, label }) => option(kind, label)));
  byId("add-chip").addEventListener("click", () => editChip(newChip(byId("add-kind").value)));
  byId("chip-cancel").addEventListener("click", () => byId("chip-dialog").close());
  byId("scope").addEventListener("change", drawScope);
  byId("scope-from").addEventListener("input", (event) => { event.target.value = Math.min(Number(event.target.value), Number(byId("scope-to").value)); drawScope(); });
  byId("scope-to").addEventListener("input", (event) => { event.target.value = Math.max(Number(event.target.value), Number(byId("scope-from").value)); drawScope(); });
  for (const name of ["same", "model-b"]) byId(name).addEventListener("change", changed);
  byId("auto").addEventListener("change", () => keep());
  byId("run-b").addEventListener("click", attempt(runB));
  byId("edit-run").addEventListener("click", attempt(runB));
  byId("edit-clear").addEventListener("click", () => { lab.edits = null; drawEdits(); changed(); });
}
