// The canvas of tokens at the step shown, and the sentence that sums the step up.

const tokens = [];

function fillTokens() {
  const parts = [["Prompt", 0, info.prompt_positions], ["Answer", info.prompt_positions, P]];
  tokens.length = 0;
  byId("tokens").replaceChildren();
  for (const [name, from, to] of parts) {
    if (from === to) continue;
    const part = make("div", undefined, `part ${name.toLowerCase()}`), flow = make("div", undefined, "flow");
    part.append(make("div", name, "name"), flow);
    for (let at = from; at < to; at++) {
      const token = make("span", undefined, "tok");
      token.dataset.at = at;
      token.style.minWidth = `calc(${widest(at)}ch + 6px)`;
      tokens.push(token);
      flow.append(token);
      if (breaksAfter(at)) flow.append(make("br"));
    }
    byId("tokens").append(part);
  }
}

function listenTokens() {
  const pointAt = (event) => { const token = event.target.closest(".tok"); if (token) point(Number(token.dataset.at)); };
  byId("tokens").addEventListener("pointerover", pointAt);
  byId("tokens").addEventListener("click", pointAt);
}

// Width of the longest token at this position in any step, so that the text does not shift while it fills in.
function widest(at) {
  let most = 1;
  for (let step = 0; step < T; step++) most = Math.max(most, info.vocabulary[tokenAt(step, at)].length);
  return Math.min(most, 8);
}

const breaksAfter = (at) => textAt(T - 1, at).endsWith("⏎");

function drawTokens() {
  const { step } = view, strongest = strongestAt(step), peak = peakNow();
  tokens.forEach((token, at) => {
    const here = tokenAt(step, at), scored = exists(step, at);
    token.textContent = info.vocabulary[here] || " ";
    token.classList.toggle("later", here === MISSING);
    token.classList.toggle("mask", here === MASK);
    token.classList.toggle("new", committed(step, at));
    token.classList.toggle("sink", Boolean(scored && isSink(step, at)));
    token.classList.toggle("strongest", at === strongest);
    token.classList.toggle("pointed", at === view.position);
    token.classList.toggle("differs", Boolean(run.differs && run.differs(step, at)));
    const color = scored ? shade(scoreAt(step, at), peak) : null;
    token.style.backgroundColor = color ? color.css : "transparent";
    token.style.color = color ? color.text : "";
  });
}

function point(at) {
  view.position = at;
  tokens.forEach((token) => token.classList.toggle("pointed", Number(token.dataset.at) === at));
  write(byId("token-readout"), ...describe(at));
  drawPointer();
  pointRow();
}

function sentence() {
  const { step } = view, at = strongestAt(step), who = whose();
  let open = 0, sinks = 0;
  for (let place = 0; place < P; place++) {
    open += data.entered[step * P + place] === MASK;
    sinks += exists(step, place) && isSink(step, place);
  }
  const state = info.causal ? `${count(existing(step), "position exists", "positions exist")} when it begins. ` : `${count(open, "position is", "positions are")} undecided when it begins. `;
  const start = [strong(`Step ${info.steps[step]}. `), state];
  if (run.live && view.head === ALL) return [...start, `The figures of ${who} are complete when the run has ended.`];
  if (at === null) return [...start, `${who[0].toUpperCase()}${who.slice(1)} has no attention at all.`];
  const score = scoreAt(step, at), where = strong(`position ${numberOf(at)}`);
  where.className = "where";
  return [...start, `In ${who}, most attention goes to `, where, " ", quoted(info.vocabulary[data.entered[step * P + at]]),
    `, which receives ${short(score)} times its uniform share, ${short((100 * score) / existing(step))} % of all attention. `,
    sinks === 0 ? "No position is a sink." : `${count(sinks, "position is a sink", "positions are sinks")}.`];
}

function drawStep() {
  byId("step").value = view.step;
  byId("step").setAttribute("aria-valuetext", `step ${info.steps[view.step]}`);
  write(byId("clock"), "step ", strong(info.steps[view.step]), ` of ${info.steps[T - 1]}`);
  write(byId("sentence"), ...sentence());
  drawTokens();
  drawPointer();
  if (view.position !== null) write(byId("token-readout"), ...describe(view.position));
}

function drawChoice() {
  drawScale(byId("scale"), peakNow(), "the scores");
  drawHeat();
  drawGrid();
  drawPath();
  drawStep();
  followHead();
}
