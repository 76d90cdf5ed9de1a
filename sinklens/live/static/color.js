// The color of the canvas: attention, how sure each step is of the undecided positions, or the step that decided them.

const COLORED = {
  attention: "Color: attention that each position receives.",
  confidence: "Color: probability of the likeliest token, at undecided positions. Full color: 1.",
  entropy: "Color: entropy of the prediction, at undecided positions. Full color: ",
  decided: "Color: the step that decided the position. Full color: the last step.",
};

async function certaintyOf(of) {
  if (!of.certainty) {
    const { shape, data: text } = await askJson(`/api/runs/${of.id}/certainty`), values = floatsOf(bytesOf(text)), size = shape[1] * shape[2];
    of.certainty = { confidence: values.subarray(0, size), entropy: values.subarray(size), positions: shape[2] };
    of.certainty.peak = of.certainty.entropy.reduce((most, value) => (value > most ? value : most), 0);
  }
  return of.certainty;
}

// What colors a position, and in words; null: nothing does.
async function tintOf(of, name) {
  if (name === "decided") return { tint: (step, at) => { const from = decidedAt(of, at); return from === null || tokenAt(step, at) === MASK ? null : inked(Math.round((255 * of.info.steps.indexOf(from)) / Math.max(1, of.info.steps.length - 1))); }, said: COLORED.decided };
  const found = await certaintyOf(of), peak = name === "entropy" ? found.peak || 1 : 1;
  const tint = (step, at) => { const value = found[name][step * found.positions + at]; return Number.isNaN(value) ? null : inked(Math.round((255 * value) / peak)); };
  return { tint, said: name === "entropy" ? `${COLORED.entropy}${short(peak)} nats.` : COLORED[name] };
}

async function drawColor() {
  const name = byId("token-color").value, of = run, line = document.querySelector(".card.canvas .head p");
  if (!of) return;
  byId("scale").hidden = name !== "attention";
  of.tint = null;
  line.textContent = `The tokens that the model works on. ${COLORED.attention}`;
  if (name !== "attention" && of.live) line.textContent = "These colors can be shown once the run has ended.";
  else if (name !== "attention") {
    line.textContent = "Computing…";
    try {
      const { tint, said } = await tintOf(of, name);
      if (byId("token-color").value !== name || run !== of) return;
      Object.assign(of, { tint });
      line.textContent = said;
    } catch (error) {
      if (run === of) line.textContent = `These colors cannot be shown: ${error.message}`;
    }
  }
  if (run === of) { drawTokens(); if (!of.tint) drawScale(byId("scale"), peakNow(), "the scores"); }
}

function listenColor() {
  const label = make("label", "Color "), select = make("select");
  select.id = "token-color";
  write(select, option("attention", "attention"), option("confidence", "confidence"), option("entropy", "entropy"), option("decided", "deciding step"));
  label.append(select);
  document.querySelector(".card.canvas .head").append(label);
  select.addEventListener("change", () => { drawColor(); keep(); });
}
