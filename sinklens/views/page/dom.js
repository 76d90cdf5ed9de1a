// Nodes and numbers as text. Model text is set as text, never as markup.

function make(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

// A line of text from strings and nodes; strings are text.
function write(node, ...parts) { node.replaceChildren(...parts.filter((part) => part !== null && part !== "")); }
const strong = (text) => make("b", text);
const quoted = (text) => make("bdi", text);

const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const count = (n, one, many) => `${n} ${n === 1 ? one : many || one + "s"}`;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

function option(value, text, disabled = false) {
  const node = make("option", text);
  node.value = value;
  node.disabled = disabled;
  return node;
}

function fail(error) {
  byId("trouble").textContent = String(error.message || error);
  byId("trouble").hidden = false;
}
