// The form of a run: model, prompt, seed, sampler settings.

// What the settings that most samplers have are called on the page; the hint gives the name of the argument.
const SETTINGS = {
  gen_length: "Answer length", block_length: "Block length", temperature: "Temperature", cfg_scale: "Guidance scale",
  confidence_dtype: "Precision", remasking: "What stays masked", threshold: "Confidence threshold", factor: "Factor rule",
  by_quota: "Keep to the schedule", stop_at_eos: "Stop at the end token", logits_eos_inf: "No end tokens",
  confidence_eos_eot_inf: "End tokens last", top_p: "Nucleus (top p)", top_k: "Most likely tokens (top k)",
  alg: "Order of commits", alg_temp: "Temperature of the order", eps: "Last time", cache: "Cache policy",
};

const formFields = { list: [], usual: new Map(), run: [] };

function fillModels() {
  const names = lab.session.models.map(({ name }) => name);
  write(byId("model-name"), ...names.map((name) => option(name, name)));
  write(byId("model-b"), option("", "as A"), ...names.map((name) => option(name, name)));
  byId("model-b").closest(".field").hidden = names.length < 2;
  write(byId("task"), ...lab.session.tasks.map(({ name }) => option(name, name)));
  byId("source").querySelector("[value=task]").disabled = !lab.session.tasks.length;
  fillSettings();
}

const chosenModel = () => lab.session.models.find(({ name }) => name === byId("model-name").value);

const settingField = (one, value) => field({ ...one, label: SETTINGS[one.name], help: `\`${one.name}\`: ${one.help}` }, value);

// One input per setting of the model's sampler, with its meaning.
function fillSettings(given = {}, sampler = null, request = {}) {
  const model = chosenModel(), { sampler: usual, samplers = [], fields, of = {}, run = [], modes = {} } = lab.session.settings[model.name];
  const name = sampler || usual, list = of[name] || fields;
  formFields.list = list.map((one) => settingField(one, given[one.name]));
  formFields.usual = new Map(list.map((one) => [one.name, one.default ?? null]));
  formFields.run = run.map((one) => settingField(one, request[one.name]));
  const boxes = [...formFields.list, ...formFields.run].map(({ box }) => box);
  formFields.sampler = samplers.length > 1 ? samplerField(samplers, name, modes) : null;
  if (formFields.sampler) {
    boxes.unshift(formFields.sampler.box);
    formFields.sampler.box.querySelector("select").addEventListener("change", () => fillSettings({}, formFields.sampler.read(), ofRun()));
  }
  write(byId("settings-fields"), ...boxes);
  byId("chat-row").hidden = !model.chat_template;
  for (const source of ["text", "task"]) byId("source").querySelector(`[value=${source}]`).disabled = !model.tokenizer || (source === "task" && !lab.session.tasks.length);
  if (!model.tokenizer) byId("source").value = "ids";
  drawForm();
}

// The sampler; of a model that decodes in several modes, the mode, by which the other samplers have their own names.
function samplerField(samplers, name, modes) {
  const named = new Map(Object.entries(modes).map(([mode, sampler]) => [sampler, mode])), said = (one) => named.get(one) || one;
  const help = named.size ? "How the model decodes: a mode, or another sampler." : "How the canvas is filled.";
  const made = field({ name: named.size ? "mode" : "sampler", type: "choice", choices: samplers.map(said), default: said(name), help }, said(name));
  return { ...made, read: () => modes[made.read()] || made.read() };
}

// Settings that differ from the sampler's defaults; the others are left to it.
function changedSettings() {
  const different = formFields.list.map(({ name, read }) => [name, read()]).filter(([name, value]) => value !== formFields.usual.get(name));
  return Object.fromEntries(different);
}

// Arguments of the run that are no settings of its sampler, such as the cache policy.
const ofRun = () => Object.fromEntries(formFields.run.map(({ name, read }) => [name, read()]));

function requestOfForm() {
  const source = byId("source").value, text = byId("prompt").value, sampler = formFields.sampler ? formFields.sampler.read() : null;
  const common = { model: byId("model-name").value, ...ofRun(), settings: changedSettings(), sampler, seed: Number(byId("seed").value), chips: [], replay: null, chat_template: !byId("chat-row").hidden && byId("chat").checked };
  if (source === "task") return { ...common, problem: { task: byId("task").value, index: Number(byId("task-index").value) } };
  if (source === "text") {
    if (!text.trim()) throw new Error("The prompt is empty; type one, or choose a problem of a task.");
    return { ...common, prompt: text };
  }
  const ids = text.split(/[\s,[\]]+/).filter(Boolean).map(Number);
  if (!ids.length || ids.some((id) => !Number.isInteger(id) || id < 0)) throw new Error("Token ids are whole numbers, separated by commas or spaces, such as 2, 287, 28.");
  return { ...common, ids };
}

function fillForm(request) {
  if (lab.session.models.some(({ name }) => name === request.model)) byId("model-name").value = request.model;
  byId("source").value = request.problem ? "task" : request.ids ? "ids" : "text";
  byId("prompt").value = request.ids ? request.ids.join(", ") : request.prompt || "";
  if (request.problem) { byId("task").value = request.problem.task; byId("task-index").value = request.problem.index; }
  byId("seed").value = request.seed ?? 0;
  byId("chat").checked = Boolean(request.chat_template);
  byId("same").checked = Boolean(request.replay);
  fillSettings(request.settings || {}, request.sampler, request);
}

function drawForm() {
  const source = byId("source").value, different = Object.entries({ ...changedSettings(), ...ofRun() }).filter(([, value]) => value !== null);
  byId("task-choice").hidden = source !== "task";
  byId("prompt").readOnly = source === "task";
  byId("prompt-label").textContent = source === "ids" ? "Token ids" : "Prompt";
  byId("settings-said").textContent = different.length ? different.map(([name, value]) => `${name} ${value}`).join(", ") : "(defaults)";
}

const showProblem = attempt(async () => {
  drawForm();
  if (byId("source").value !== "task") return;
  const { prompt, size } = await askJson(`/api/tasks/${encodeURIComponent(byId("task").value)}/${Number(byId("task-index").value)}`);
  byId("prompt").value = prompt;
  byId("task-index").max = size - 1;
});

function listenForm() {
  byId("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    pending(true);
    await attempt(runA)();
    pending(false);
  });
  byId("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit(); });
  byId("model-name").addEventListener("change", () => fillSettings());
  for (const name of ["source", "task", "task-index"]) byId(name).addEventListener("change", showProblem);
  byId("settings-fields").addEventListener("change", drawForm);
  byId("form").addEventListener("change", () => keep());
  byId("prompt").addEventListener("input", () => keep());
  byId("halt").addEventListener("click", attempt(halt));
}
