// Run A and run B repeated: with other seeds, or on the problems of a task.

const percent = (share) => `${(100 * share).toFixed(0)} %`;
const overSaid = ({ over }, n) => (over === "seeds" ? count(n, "seed") : `${count(n, "problem")} of ${over}`);

function learnRepeats(state) {
  if (!state) return;
  lab.repeats.set(`${state.a}/${state.b}`, state);
  drawRepeats();
  if (lab.pair) drawVerdict();
}

const repeatsNow = () => lab.repeats.get(`${lab.A}/${lab.B}`);

function repeatsSaid(state) {
  const { done, total, changed, interval, alike, status, error, right, difference } = state;
  if (status === "failed") return `The repetitions failed: ${error}`;
  if (!done) return "Repeating…";
  const so = status === "running" ? `${done} of ${total} so far: ` : "";
  if (alike) return `${so}run A is the same with every seed, because its sampler draws no random numbers; repeat on the problems of a task instead.`;
  const solved = right ? ` Right: A ${right[0]}, B ${right[1]} (difference ${percent(difference[0])} [${percent(difference[1])}, ${percent(difference[2])}]).` : "";
  return `${so}the answer changes in ${changed} of ${overSaid(state, done)}: ${percent(changed / done)} [${percent(interval[0])}, ${percent(interval[1])}], 95 % interval.${solved}`;
}

// For the line beside the switch: whether the verdict holds beyond this pair.
function repeatsVerdict() {
  const state = repeatsNow();
  if (!state || !state.done || state.alike || state.status === "failed") return [`one pair; repeat it under Details for an interval`];
  return [`in ${state.changed} of ${overSaid(state, state.done)} [${percent(state.interval[0])}, ${percent(state.interval[1])}]`];
}

function drawRepeats() {
  const state = repeatsNow(), busy = Boolean(state) && state.status === "running";
  byId("repeats-said").textContent = state ? repeatsSaid(state) : "";
  byId("repeats-stop").hidden = !busy;
}

async function repeatPair() {
  const { A, B } = lab;
  try {
    learnRepeats(await askJson("/api/repeats", { a: A, b: B, over: byId("repeats-over").value, count: Number(byId("repeats-count").value) }));
  } catch (error) {
    lab.repeats.delete(`${A}/${B}`);
    byId("repeats-said").textContent = error.message;
  }
}

function listenRepeats() {
  write(byId("repeats-over"), ...lab.session.tasks.map(({ name }) => option(name, `problems of ${name}`)), option("seeds", "seeds"));
  byId("repeats-run").addEventListener("click", repeatPair);
  byId("repeats-stop").addEventListener("click", attempt(() => askJson("/api/repeats/cancel", {})));
}
