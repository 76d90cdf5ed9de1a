// Inputs made from the server's descriptions of settings and changes: { name, type, default, choices, help }.

let fieldCount = 0;

const NUMBERS = ["int", "float", "layer", "head", "pos", "step"];

function fieldKind({ type, choices }) {
  if (choices && choices.length) return "choice";
  if (NUMBERS.includes(type)) return "number";
  return { steps: "steps", bool: "yes", heads: "heads" }[type] || "text";
}

const NAMES = { pos: "Position", by: "Replace by", from_step: "Keep from step", top_k: "Strongest keys" };
const inWords = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

// A text in which `code` stands in backticks, as nodes.
const coded = (text) => text.split(/`+/).map((part, at) => (at % 2 ? make("code", part) : part));

// A label, its input, and a hint; `read()` returns the value, null if it is empty.
function field(given, value, last) {
  const box = make("div", undefined, "field"), label = make("label", given.label || NAMES[given.name] || inWords(given.name)), kind = fieldKind(given), holder = make("span", undefined, "inputs");
  const id = `field-${fieldCount++}`, [inputs, read] = makers[kind](given, value, last);
  inputs[0].id = id;
  label.htmlFor = id;
  holder.append(...inputs);
  box.append(label, holder);
  if (given.help && given.help !== `the ${given.name}`) {
    const help = make("span", undefined, "help");
    write(help, ...coded(given.help));
    help.id = `${id}-help`;
    inputs.forEach((input) => input.setAttribute("aria-describedby", help.id));
    box.append(help);
  }
  box.dataset.name = given.name;
  return { box, read, name: given.name };
}

function numberInput(value, whole, placeholder) {
  const input = make("input");
  Object.assign(input, { type: "number", step: whole ? "1" : "any", value: value ?? "", placeholder: placeholder ?? "" });
  return input;
}

const numberIn = (input) => (input.value.trim() === "" ? null : Number(input.value));

const makers = {
  choice({ choices, default: usual }, value) {
    const input = make("select"), all = choices.map((choice) => (choice === null ? "" : String(choice)));
    write(input, ...all.map((choice) => option(choice, choice === "" ? "none" : choice)));
    input.value = value ?? usual ?? "";
    return [[input], () => choices[all.indexOf(input.value)] ?? null];
  },
  yes({ default: usual }, value) {
    const input = make("input");
    Object.assign(input, { type: "checkbox", checked: Boolean(value ?? usual) });
    return [[input], () => input.checked];
  },
  number({ type, default: usual, optional }, value) {
    const input = numberInput(value ?? usual, type !== "float", optional ? "all" : "none");
    return [[input], () => numberIn(input)];
  },
  text({ default: usual }, value) {
    const input = make("input");
    Object.assign(input, { type: "text", value: value ?? usual ?? "", autocomplete: "off", spellcheck: false });
    return [[input], () => (input.value === "" ? null : input.value)];
  },
  heads(_, value) {
    const input = make("input");
    Object.assign(input, { type: "text", value: (value || []).join(", "), placeholder: "all", autocomplete: "off", inputMode: "numeric" });
    return [[input], () => (input.value.trim() === "" ? null : input.value.split(/[\s,]+/).filter(Boolean).map(Number))];
  },
  steps(_, value, last) {
    const from = numberInput(value ? value[0] : null, true, "0"), to = numberInput(value ? value[1] : null, true, String(last));
    from.setAttribute("aria-label", "first step");
    to.setAttribute("aria-label", "last step");
    return [[from, to], () => (numberIn(from) === null && numberIn(to) === null ? null : [numberIn(from) ?? 0, numberIn(to) ?? last])];
  },
};
