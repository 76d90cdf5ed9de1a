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
  drawTools();
}

function drawState() {
  const active = [lab.B, lab.A].filter((id) => id && isActive(id)), id = active[0] || shownId(), summary = summaryOf(id), bar = byId("progress");
  byId("halt").disabled = !active.length;
  byId("run").textContent = "Run";
  bar.hidden = !active.length;
  bar.max = summary.steps || 1;
  bar.value = summary.steps_run || 0;
  byId("state").textContent = stateSaid(summary, id === lab.B ? "B" : "A");
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

function drawHistory() {
  const runs = [...lab.runs.values()].sort((a, b) => (b.created || 0) - (a.created || 0)).slice(0, 200);
  write(byId("history"), ...runs.map(historyItem), runs.length ? null : make("li", "Finished runs are listed here."));
  drawAB();
}

function historyItem(summary) {
  const { id, model, prompt, text, status, chips, replay, from_canvas: edited, right, error } = summary;
  const item = make("li"), what = make("span", undefined, "what"), tools = make("span", undefined, "row");
  const facts = [model, chips ? count(Number(chips), "change") : "", replay ? "on the canvases of another run" : "", edited ? "edited canvas" : "", STATUS[status], right === true ? "✓ right" : right === false ? "✗ wrong" : ""];
  what.append(make("span", error || text || prompt || "", "line"), make("span", facts.filter(Boolean).join(" · "), "soft"));
  what.title = prompt || "";
  const name = `${model} run ${id}`;
  tools.append(button("as A", `Show ${name} as A`, attempt(() => place("A", id))), button("as B", `Show ${name} as B`, attempt(() => place("B", id))),
    isActive(id) ? button("Stop", `Stop ${name}`, attempt(() => askJson(`/api/runs/${id}/cancel`, {}))) : button("Delete", `Delete ${name}`, attempt(() => ask(`/api/runs/${id}`, undefined, "DELETE"))));
  item.append(make("span", id === lab.A ? "A" : id === lab.B ? "B" : "", "now"), what, tools);
  return item;
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
