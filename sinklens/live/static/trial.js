// Every head tried in turn: what its ablation changes in run A, as a map and as a list.

const LISTED = 6;
const STRENGTH = "Score of the strongest key, mean over steps. Click a head to select it.";
const EFFECT = "KL divergence of run A without the head, mean over steps, on A's canvases. Dot: ";

// The trial of run A, if the run shown has the same heads.
const trialNow = () => (lab.A && summaryOf(shownId()).model === summaryOf(lab.A).model ? lab.trials.get(lab.A) : undefined);
// Whether a head changes the number after ####: null where A's answer states none, or cannot change.
const changesNumber = ({ number }, { same, number: other }) => (number === null || same === null ? null : number !== other);
const matters = (trial, entry) => changesNumber(trial, entry) ?? entry.same === false;
// Heads that change the number, then those that change only the text, by how many tokens change; then by KL.
const largestFirst = (trial) => (a, b) => matters(trial, b) - matters(trial, a) || (b.same === false) - (a.same === false) || (b.changed ?? 0) - (a.changed ?? 0) || (b.kl ?? 0) - (a.kl ?? 0);

const tryHeads = attempt(async (by = "zero", layer = null) => {
  if (!lab.A || isActive(lab.A)) throw new Error("Run A has not ended yet; try its heads when it has.");
  byId("grid-color").value = "effect";
  const run = lab.A;
  try {
    await askJson(`/api/runs/${run}/heads`, { by, layer });
  } catch (error) {
    learnTrial({ run, by, status: "failed", done: 0, total: 0, heads: [], number: null, error: error.message });
  }
});

// A state of a trial: all its heads, or those that follow the ones known.
function learnTrial(state) {
  if (!state) return;
  const known = lab.trials.get(state.run), heads = state.done === state.heads.length ? [] : (known ? known.heads : []);
  lab.trials.set(state.run, { ...state, heads: [...heads, ...state.heads] });
  if (state.run === lab.A) drawTrial();
}

// The words that are different in another answer.
function newWords(text, opposite) {
  const others = (opposite || "").split(/\s+/), words = (text || "").split(/\s+/).filter((word, at) => word !== others[at]);
  return [...new Set(words)].slice(0, 4).join(" ");
}

function outcomeOf(trial, entry) {
  const { same, text, number, right, changed } = entry, words = quoted(newWords(text, summaryOf(lab.A).text) || text || "other tokens");
  if (same === null) return [];
  if (same) return ["same answer"];
  const verdict = right === true ? " ✓ right" : right === false ? " ✗ wrong" : "", tokens = ` (${Math.round(100 * changed)} % of tokens)`;
  if (changesNumber(trial, entry)) return ["#### ", strong(`${trial.number} → ${number ?? "none"}`), verdict, tokens];
  return [changesNumber(trial, entry) === false ? "text only: " : "text: ", words, verdict, tokens];
}

function headRow(entry, most, trial) {
  const { by } = trial, item = make("li"), bar = make("button", undefined, "bar-of"), fill = make("i"), name = headSaid(entry.layer, entry.head);
  fill.style.width = `${(100 * (entry.kl ?? 0)) / most}%`;
  bar.type = "button";
  bar.title = `Select ${name}`;
  bar.append(fill, make("bdi", name));
  bar.addEventListener("click", () => choose(entry.layer, entry.head));
  const said = make("span", undefined, "soft");
  said.title = entry.text || "";
  write(said, ...outcomeOf(trial, entry));
  item.append(bar, make("span", entry.kl === null ? "–" : entry.kl.toPrecision(2), "value"), said,
    button("Ablate", `Ablate ${name} (${by})`, () => addChip("ablate_head", { layer: entry.layer, head: entry.head, by, steps: null })));
  return item;
}

// What changes, of `heads`: "5 heads change the answer", or "1 head changes the number after ####, 4 only the text".
function changesSaid(trial) {
  const { heads, number } = trial, some = (n) => (n === 1 ? "1 head changes" : `${n || "no"} heads change`);
  const any = heads.filter(({ same }) => same === false).length, numbers = heads.filter((entry) => changesNumber(trial, entry)).length;
  if (number === null) return `${some(any)} the text of the answer`;
  return `${some(numbers)} the number after #### (${number})${any > numbers ? `, ${any - numbers} only other text` : ""}`;
}

function trialSaid(trial) {
  const { status, done, total, left, heads, error, kl_why: why } = trial, changes = changesSaid(trial), best = [...heads].sort((a, b) => (b.kl ?? 0) - (a.kl ?? 0))[0];
  if (status === "failed") return error;
  if (status === "running") return `${done} of ${total} heads tried${left ? `, about ${left < 90 ? `${Math.ceil(left)} s` : `${Math.round(left / 60)} min`} left` : ""}; ${changes}.`;
  if (!heads.length) return "Stopped before the first head was tried.";
  const tried = status === "cancelled" ? `the ${done} heads tried (of ${total})` : `${count(total, "head")}`;
  const answers = heads[0].same === null ? "" : `Of ${tried}, each ablated alone, ${changes}.`;
  return `${answers} ${best.kl === null ? why || "" : `Largest KL: ${headSaid(best.layer, best.head)}, ${best.kl.toPrecision(2)} nats.`}`;
}

function drawTrial() {
  const trial = trialNow(), on = Boolean(trial) && byId("grid-color").value === "effect", byPlace = new Map((trial ? trial.heads : []).map((entry) => [`${entry.layer}/${entry.head}`, entry]));
  byId("trial").hidden = byId("grid-color-row").hidden = !trial;
  byId("try-heads").disabled = !lab.A || isActive(lab.A) || (trial && trial.status === "running");
  const at = (layer, head) => byPlace.get(`${layer}/${head}`);
  grid.other = !on ? null : {
    values: Float32Array.from({ length: L * H }, (_, place) => at(Math.floor(place / H), place % H)?.kl ?? NaN),
    marked: (layer, head) => Boolean(at(layer, head)) && matters(trial, at(layer, head)), what: "KL divergences in nats",
    said(layer, head) {
      const entry = at(layer, head);
      return entry ? [entry.kl === null ? "" : "KL ", entry.kl === null ? "" : strong(entry.kl.toPrecision(2)), entry.kl === null ? "" : " nats without it; ", ...outcomeOf(trial, entry)] : ["not tried"];
    },
  };
  byId("grid-said").textContent = on ? `${EFFECT}${trial.number === null ? "the text of the answer" : "the number after ####"} changes.` : STRENGTH;
  if (run) drawGrid();
  if (!trial) return;
  byId("trial-bar").hidden = byId("trial-stop").hidden = trial.status !== "running";
  Object.assign(byId("trial-bar"), { max: trial.total, value: trial.done });
  byId("trial-said").textContent = trialSaid(trial);
  const sorted = [...trial.heads].sort(largestFirst(trial)), most = Math.max(1e-9, ...trial.heads.map(({ kl }) => kl ?? 0));
  write(byId("trial-list"), ...sorted.slice(0, LISTED).map((entry) => headRow(entry, most, trial)));
  document.body.dataset.tried = `${trial.run}/${trial.status}`;
}

function allHeadItems() {
  const from = firstKept(), layer = view.layer === ALL ? null : view.layer;
  return [
    ["all heads"],
    ["Try every head: ablate each in turn (zero)", () => tryHeads("zero")],
    ["Try every head: ablate each in turn (mean)", () => tryHeads("mean")],
    ...(layer === null ? [] : [[`Try the heads of layer ${layer} (zero)`, () => tryHeads("zero", layer)]]),
    [`Mask the ${anySink((at) => data.heads[view.step * P + at]) ? "sinks" : "strongest keys"} of all heads, ${whenSaid()}`, () => addChip("mask_sinks")],
    [`Hold the sinks of all heads still from step ${from} on`, () => addChip("hold_sink", { layer: null, head: null, from_step: from })],
  ];
}

function listenTrial() {
  const card = document.querySelector(".card.grid");
  card.querySelector(".head p").id = "grid-said";
  card.querySelector(".head").append(byId("grid-color-row"));
  card.after(byId("trial"));
  const tryAll = button("Try every head", "Ablate each head of run A in turn, and list what changes", () => tryHeads());
  tryAll.id = "try-heads";
  tryAll.classList.add("change");
  card.querySelector(".head .change").before(tryAll);
  byId("grid-color").addEventListener("change", drawTrial);
  byId("trial-stop").addEventListener("click", attempt(() => askJson(`/api/runs/${lab.A}/cancel`, {})));
}
