// The report: one finished run, whose numbers are in this document.

function fillHeader() {
  document.title = `${info.model} · sinklens report`;
  byId("model").textContent = info.model;
  for (const [value, label] of info.facts) {
    const item = make("li");
    write(item, value && strong(value), ` ${label}`);
    byId("facts").append(item);
  }
  byId("prompt").textContent = info.prompt;
  byId("answer").textContent = info.answer;
  byId("notes").append(...info.notes.map((note) => make("li", note)));
  for (const [name, value] of info.settings) byId("settings").append(make("dt", name), make("dd", value));
}

// Attention as this document holds it: some steps, some layers.
function heldAttention({ places, block, cells, why }) {
  const value = (level) => (level / 255) ** 2;
  return {
    why, cells, places,
    note: ` This page holds steps ${[...new Set(places.map(([step]) => step))].join(", ")}.`,
    async read(step, layer) {
      const side = places.find(([s, l]) => s === step && l === layer)[2];
      return { map: new Uint8Array(await readBytes(`pattern-${step}-${layer}`)), side, block, value };
    },
    script: () => readText("circuitsvis"),
    load(frame) { frame.srcdoc = info.frame; },
  };
}

async function openReport() {
  const given = readJson("info"), arrays = {};
  await Promise.all(Object.entries(KINDS).map(async ([name, kind]) => { arrays[name] = new kind(await readBytes(name)); }));
  const report = packedRun(given, arrays, async (layer) => {
    const name = layer === ALL ? "all" : String(layer);
    const [scores, sinks] = await Promise.all([readBytes("scores-" + name), readBytes("sinks-" + name)]);
    return { scores, sinks, peaks: given.peaks[name] };
  });
  useRun({ ...report, attention: heldAttention(given.attention) });
}
