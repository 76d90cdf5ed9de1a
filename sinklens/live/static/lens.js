// What each layer predicts at a position, step by step, and which layers carry the difference from another prompt.

const lensNow = { pos: null, of: null };

async function readLens(pos) {
  const id = shownId(), card = byId("lens");
  Object.assign(lensNow, { pos, of: id });
  card.hidden = false;
  for (const name of ["lens-table", "attribution-table"]) write(byId(name));
  byId("lens-said").textContent = `Reading position ${pos}…`;
  byId("attribution-said").textContent = "";
  if (!byId("attribution-prompt").value) byId("attribution-prompt").value = promptOfA();
  card.scrollIntoView({ block: "nearest" });
  try {
    const found = await askJson(`/api/runs/${id}/lens?pos=${pos}`);
    if (lensNow.of === id && lensNow.pos === pos) drawLens(found);
  } catch (error) {
    if (lensNow.of === id && lensNow.pos === pos) byId("lens-said").textContent = `Could not be read: ${error.message}`;
  }
}

function headRowOf(first, steps) {
  const row = make("tr");
  row.append(...[first, ...steps].map((text) => { const cell = make("th", text); cell.scope = "col"; return cell; }));
  return row;
}

function cellOf(text, share, title) {
  const cell = make("td", text), color = share === null ? null : inked(clamp(Math.round(255 * share), 0, 255));
  if (color) Object.assign(cell.style, { backgroundColor: color.css, color: color.text });
  cell.title = title;
  return cell;
}

function drawLens({ pos, steps, layers, final, token, p, entropy, final_p: share }) {
  byId("lens-said").textContent = `Position ${pos}, whose final token is “${final ?? "…"}”: the likeliest token of each layer (rows) at each step (columns). Darker: the layer gives the final token more probability.`;
  write(byId("lens-table"), headRowOf("layer", steps), ...layers.map((_, n) => layers.length - 1 - n).map((at) => {
    const row = make("tr");
    row.append(make("th", layers[at]), ...steps.map((step, n) => cellOf(token[n][at], share[n][at],
      p[n][at] === null ? "" : `step ${step}, layer ${layers[at]}: probability ${p[n][at].toFixed(3)}, entropy ${entropy[n][at].toFixed(2)} nats; final token ${share[n][at] === null ? "–" : share[n][at].toFixed(3)}`)));
    return row;
  }));
}

async function attribute() {
  const { pos, of } = lensNow, said = byId("attribution-said");
  write(byId("attribution-table"));
  said.textContent = "Computing…";
  try {
    const found = await askJson(`/api/runs/${of}/attribution`, { pos, prompt: byId("attribution-prompt").value });
    if (lensNow.of === of && lensNow.pos === pos) drawAttribution(found);
  } catch (error) {
    said.textContent = `Could not be computed: ${error.message}`;
  }
}

function drawAttribution({ steps, layers, final, attention, mlp }) {
  const most = Math.max(1e-9, ...[...attention, ...mlp].flat().map((value) => Math.abs(value ?? 0)));
  byId("attribution-said").textContent = `Estimated change of the log-probability of “${final ?? "…"}” in nats, if the layer's output from this run's prompt replaces that from the other prompt, on the same canvas. Darker: a larger change of either sign.`;
  const rows = [["attention", attention], ["MLP", mlp]].flatMap(([name, values]) => layers.map((layer) => {
    const row = make("tr");
    row.append(make("th", `${name} ${layer}`), ...steps.map((step, n) => { const value = values[n][layer]; return cellOf(value === null ? "–" : value.toFixed(2), value === null ? null : Math.abs(value) / most, `step ${step}`); }));
    return row;
  }));
  write(byId("attribution-table"), headRowOf("layer", steps), ...rows);
}

// The tables are of one run; another one on the page hides them.
function checkLens() {
  if (lensNow.of !== shownId()) byId("lens").hidden = true;
}

function listenLens() {
  document.querySelector(".card.attention").after(byId("lens"));
  byId("attribution-run").addEventListener("click", attribute);
}
