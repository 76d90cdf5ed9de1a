// What the lab shows about its runs: the two on the page, the state of the queue, and all earlier runs.

const STATUS = { queued: "waiting", running: "running", done: "", failed: "failed", cancelled: "stopped" };

function drawAB() {
  document.body.dataset.wanted = shownId() || "";
  for (const slot of ["A", "B"]) {
    const node = byId(`show-${slot}`), id = lab[slot];
    node.disabled = !id;
    node.setAttribute("aria-pressed", String(lab.shown === slot));
    node.title = id ? `Show run ${slot} (${slot === "A" ? 1 : 2}): ${summaryOf(id).model}, ${count(Number(summaryOf(id).chips) || 0, "change")}` : `There is no run ${slot} yet`;
  }
  byId("pin").disabled = lab.shown !== "B" || !lab.B || isActive(lab.B);
  const { model, prompt } = summaryOf(shownId());
  byId("title").textContent = model ? `${model}: ${prompt}` : "No run yet";
  byId("title").title = prompt || "";
  document.title = model ? `${model} · sinklens lab` : "sinklens lab";
  byId("run-b").textContent = lab.again ? "Run B waits for A" : "Run B";
  drawFolds();
  drawTools();
}

function drawState() {
  const active = [lab.B, lab.A].filter((id) => id && isActive(id)), id = active[0] || shownId(), summary = summaryOf(id), bar = byId("progress");
  byId("halt").disabled = byId("halt").hidden = !active.length;
  byId("run").textContent = "Run";
  bar.hidden = !active.length;
  bar.max = summary.steps || 1;
  bar.value = summary.steps_run || 0;
  byId("state").textContent = [stateSaid(summary, id === lab.B ? "B" : "A"), lab.again ? "Run B starts when run A has ended." : ""].filter(Boolean).join(" ");
  drawAB();
}

function stateSaid(summary, slot) {
  const { status, steps_run: ran, steps, seconds, left } = summary;
  if (!status) return "";
  if (status === "queued") return `Run ${slot} waits.`;
  if (status === "running") return `Run ${slot}: step ${ran || 0}${steps ? ` of ${steps}` : ""}${left > 0.5 ? `, about ${left < 90 ? `${Math.ceil(left)} s` : `${Math.round(left / 60)} min`} left` : ""}.`;
  if (status === "failed") return `Run ${slot} failed.`;
  return `Run ${slot} ${status === "cancelled" ? "was stopped" : "is finished"}${seconds ? `: ${ran ?? steps} steps, ${short(seconds)} s` : ""}.`;
}

const KEPT_BACK = 10000; // milliseconds for which a deletion can be undone
const wordsOf = (summary) => [summary.model, summary.prompt, summary.text, summary.error, `seed ${summary.seed ?? 0}`, changesOf(summary), summary.task && `${summary.task.task} ${summary.task.index}`].filter(Boolean).join(" ");
const changesOf = ({ changes }) => (changes && changes.length ? changes.map(saidOf).join("; ") : "");

function drawHistory() {
  const wanted = byId("history-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const runs = [...lab.runs.values()].sort((a, b) => (b.created || 0) - (a.created || 0));
  const found = runs.filter((summary) => { const words = wordsOf(summary).toLowerCase(); return wanted.every((word) => words.includes(word)); });
  write(byId("history"), ...found.slice(0, 200).map(historyItem), runs.length ? null : make("li", "Finished runs are listed here."));
  byId("history-count").textContent = wanted.length ? `${found.length} of ${count(runs.length, "run")}` : count(runs.length, "run");
  drawAB();
}

function historyItem(summary) {
  const { id, model, prompt, text, status, replay, right, error, seed, task } = summary;
  const item = make("li"), what = make("span", undefined, "what"), tools = make("span", undefined, "row"), mark = id === lab.A ? "A" : id === lab.B ? "B" : "";
  const called = `${model} run ${id}`;
  if (lab.leaving.has(id)) {
    what.append(`Deleted: ${prompt || id}`);
    item.append(make("span", mark, "now"), what, button("Undo", `Keep ${called}`, () => { clearTimeout(lab.leaving.get(id)); lab.leaving.delete(id); drawHistory(); }));
    return item;
  }
  const facts = [model, task ? `${task.task} ${task.index}` : "", `seed ${seed ?? 0}`, changesOf(summary) || "no changes", replay ? "on the canvases of another run" : "", STATUS[status], right === true ? "✓ right" : right === false ? "✗ wrong" : ""];
  what.append(make("span", prompt || "", "line"), make("span", facts.filter(Boolean).join(" · "), "soft"), make("span", error || text || "", "soft answer"));
  what.title = prompt || "";
  tools.append(button("as A", `Show ${called} as A`, attempt(() => place("A", id))), button("as B", `Show ${called} as B`, attempt(() => place("B", id))),
    isActive(id) ? button("Stop", `Stop ${called}`, attempt(() => askJson(`/api/runs/${id}/cancel`, {}))) : button("Delete", `Delete ${called}`, () => leave(id)));
  item.append(make("span", mark, "now"), what, tools);
  return item;
}

// Deletes a run after a while, in which it can be kept.
function leave(id) {
  lab.leaving.set(id, setTimeout(attempt(async () => { lab.leaving.delete(id); await ask(`/api/runs/${id}`, undefined, "DELETE"); }), KEPT_BACK));
  drawHistory();
}

// Shows a run as A or B; the changes become those of B, and as A the form becomes that of A.
async function place(slot, id) {
  lab.following = false;
  const request = await requestOf(id), asB = slot === "B" && lab.A && lab.A !== id;
  if (asB) Object.assign(lab, { B: id, shown: "B", pair: null, chips: (request.chips || []).map((chip) => ({ ...chip })) });
  else {
    const B = lab.B !== id && lab.B;
    setA(id);
    if (B) lab.B = B;
    fillForm(request);
  }
  drawChips();
  drawHistory();
  await present();
}

// Makes run B the reference.
async function pin() {
  setA(lab.B);
  drawHistory();
  await present();
}

function showSlot(slot) {
  if (!lab[slot]) return;
  lab.shown = slot;
  present();
}
