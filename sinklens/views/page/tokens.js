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
    if (to === P) foldEnd(flow, tokens.slice(endOf(run) + 1));
    byId("tokens").append(part);
  }
}

const FOLDED = 3; // end tokens at the end of an answer that become one line, if there are as many

// Index of the first of the end tokens with which the answer of a run ends.
function endOf(of) {
  const { ends = [], positions, prompt_positions: start, steps } = of.info, known = new Set(ends);
  let from = positions;
  while (from > start && known.has(of.data.left[(steps.length - 1) * positions + from - 1])) from--;
  return from;
}

// Folds the end tokens that follow the answer's first one; a button shows them. `folded` are their nodes in `flow`.
function foldEnd(flow, folded) {
  if (folded.length < FOLDED) return;
  const closed = `+ ${folded.length} that become end tokens`, more = make("button", closed, "more");
  more.type = "button";
  more.setAttribute("aria-expanded", "false");
  more.addEventListener("click", () => {
    const on = flow.classList.toggle("unfolded");
    more.setAttribute("aria-expanded", String(on));
    more.textContent = on ? "fold the end tokens" : closed;
  });
  for (const token of folded) token.classList.add("ended");
  flow.append(more);
}

function listenTokens() {
  const pointAt = (event) => {
    const token = event.target.closest(".tok"), at = token && Number(token.dataset.at);
    if (!token) return;
    point(at);
    if (event.type === "click") tell(info.steps[view.step], view.layer, view.head, null, numberOf(at));
  };
  for (const kind of ["pointerover", "click"]) byId("tokens").addEventListener(kind, pointAt);
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
    const color = run.tint ? run.tint(step, at) : scored ? shade(scoreAt(step, at), peak) : null;
    token.style.backgroundColor = color ? color.css : "transparent";
    token.style.color = color ? color.text : "";
  });
  const more = byId("tokens").querySelector(".more"); // it is marked as what it hides
  for (const mark of more ? ["sink", "differs"] : []) more.classList.toggle(mark, tokens.some((token) => token.classList.contains("ended") && token.classList.contains(mark)));
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
  Object.assign(byId("step-number"), { min: info.steps[0], max: info.steps[T - 1], value: info.steps[view.step] });
  write(byId("clock"), `of ${info.steps[T - 1]}`, info.modes ? `, ${info.modes[view.step]} pass` : "");
  write(byId("sentence"), ...sentence());
  drawTokens();
  drawPointer();
  if (view.position !== null) write(byId("token-readout"), ...describe(view.position));
}

function drawChoice() {
  if (!run.tint) drawScale(byId("scale"), peakNow(), "the scores");
  drawHeat();
  drawGrid();
  drawPath();
  drawStep();
  followHead();
}
