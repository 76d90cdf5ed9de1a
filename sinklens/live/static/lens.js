// What each layer predicts at a position, step by step.

const lensNow = { pos: null, of: null };

async function readLens(pos) {
  const id = shownId(), card = byId("lens");
  Object.assign(lensNow, { pos, of: id });
  card.hidden = false;
  write(byId("lens-table"));
  byId("lens-said").textContent = `Reading position ${pos}…`;
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

// The table is of one run; another one on the page hides it.
function checkLens() {
  if (lensNow.of !== shownId()) byId("lens").hidden = true;
}

function listenLens() {
  document.querySelector(".card.attention").after(byId("lens"));
}
