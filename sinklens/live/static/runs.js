// Runs as the figures read them: a finished one from the server's arrays, a running one from its events.

// Any step and layer; computed by the server when it is looked at.
function askedAttention(id, cells) {
  return {
    places: null, note: " The map follows the step and the head chosen above.", why: "", cells,
    async read(step, layer) {
      const { shape, data: text } = await askJson(`/api/runs/${id}/pattern?step=${step}&layer=${layer}`);
      return { map: floatsOf(bytesOf(text)), side: shape[1], block: 1, value: (share) => share };
    },
    script: async () => (await ask("/static/circuitsvis.js")).text(),
    load(frame) { frame.src = addressOf("/frame"); },
  };
}

function finishedRun(id, { info: given, chunks }) {
  const arrays = {};
  for (const [name, kind] of Object.entries(KINDS)) arrays[name] = new kind(bytesOf(chunks[name]));
  const packed = packedRun(given, arrays, async (layer) => {
    const maps = await askJson(`/api/runs/${id}/maps?layer=${layer}`);
    return { scores: bytesOf(maps.scores), sinks: bytesOf(maps.sinks), peaks: maps.peaks };
  });
  return { ...packed, id, live: false, attention: askedAttention(id, given.cells) };
}

// The request that a server's specification came from.
function requestOfSpec({ model, prompt, task, settings, sampler, seed, chat_template, cache, chips, replay, compare_to }) {
  const input = task ? { problem: { task: task[0], index: task[1] } } : typeof prompt === "string" ? { prompt } : { ids: prompt };
  return { model, ...input, settings, sampler, seed, chat_template, cache, chips, replay, compare_to };
}

// The events that a tab has missed, from the steps so far.
function missedEvents({ canvas, undecided, tokens, scores }) {
  const { shape: [steps, layers, heads, positions], data: text } = scores;
  if (text === null) return [];
  const all = floatsOf(bytesOf(text));
  const top = (step, layer, head) => {
    const row = all.subarray((((step * layers) + layer) * heads + head) * positions, (((step * layers) + layer) * heads + head + 1) * positions);
    return [...row.keys()].filter((at) => !Number.isNaN(row[at])).sort((a, b) => row[b] - row[a]).slice(0, 3).map((at) => [at, row[at]]);
  };
  return Array.from({ length: steps }, (_, step) => ({
    step, canvas: canvas[step + 1], tokens, committed: undecided[step].filter((at) => !undecided[step + 1].includes(at)),
    sinks: Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (_, head) => top(step, layer, head))),
  }));
}

// A run under way. Only the largest scores of each head have arrived; other positions count as 0.
function liveRun(id, began, { layers: L, heads: H, causal, mask_token: mask }) {
  const P = began.positions, texts = ["", "░"], places = new Map(mask === null ? [] : [[mask, MASK]]), tops = [], means = [], peaks = new Map();
  const arrays = { entered: [], left: [], committed: [], path: [], heads: [], strength: new Float32Array(L * H) };
  const known = {
    steps: [], positions: P, first: 0, prompt_positions: began.prompt_length, layers: L, heads: H, causal, vocabulary: texts,
    held: Array.from({ length: L }, (_, layer) => layer), cells: 0,
  };
  const name = (token, text) => { if (!places.has(token)) { places.set(token, texts.length); texts.push(text); } return places.get(token); };
  const placesOf = (canvas) => Array.from({ length: P }, (_, at) => (canvas[at] === undefined || canvas[at] < 0 ? MISSING : name(canvas[at], `⟨${canvas[at]}⟩`)));
  const peakOf = (key, score) => peaks.set(key, Math.max(peaks.get(key) || 0, score));
  const learn = (words) => { for (const [token, text] of Object.entries(words || {})) name(Number(token), text); };
  const largest = (row) => row.reduce((best, score, at) => (score > row[best] ? at : best), 0);
  learn(began.tokens);
  let canvas = placesOf(began.canvas);

  function add(event) {
    if (event.step < known.steps.length) return;
    learn(event.tokens);
    const next = placesOf(event.canvas), N = canvas.filter((place) => place !== MISSING).length, mean = new Float32Array((1 + L) * P);
    const decided = new Set(event.committed), heads = new Uint16Array(P), path = [];
    tops.push(event.sinks);
    event.sinks.forEach((row, layer) => row.forEach((top, head) => {
      for (const [at, score] of top) {
        mean[at] += score / (L * H);
        mean[(1 + layer) * P + at] += score / H;
        heads[at] += over(score, N);
      }
      const [at, score] = top[0] || [-1, 0], was = arrays.strength[layer * H + head];
      path.push(score > 0 ? at : -1);
      peakOf(`${layer}/${head}`, score);
      arrays.strength[layer * H + head] = was + (score - was) / (known.steps.length + 1);
    }));
    const rows = Array.from({ length: 1 + L }, (_, row) => mean.subarray(row * P, (row + 1) * P)), best = rows.map(largest);
    rows.forEach((row, at) => peakOf(at ? `${at - 1}/${ALL}` : `${ALL}/${ALL}`, row[best[at]]));
    means.push(mean);
    arrays.entered.push(...canvas);
    arrays.left.push(...next);
    arrays.committed.push(...next.map((_, at) => Number(decided.has(at))));
    arrays.heads.push(...heads);
    arrays.path.push(...best, ...path);
    known.steps.push(event.step);
    canvas = next;
  }

  // The definition of a sink, with the mean of the others taken from the sum of all scores, which is the number of rows.
  const over = (score, N) => score > 3 + (N - score) / Math.max(1, N - 1);
  const score = (step, at, layer, head) => {
    if (layer === ALL) return means[step][at];
    if (head === ALL) return means[step][(1 + layer) * P + at];
    const found = tops[step][layer][head].find(([place]) => place === at);
    return found ? found[1] : 0;
  };
  const existingAt = (step) => { let n = 0; for (let at = 0; at < P; at++) n += arrays.entered[step * P + at] !== MISSING; return n; };
  return {
    id, live: true, info: known, data: arrays, held: known.held, began, add, score,
    async load() {},
    sink: (step, at, layer, head) => over(score(step, at, layer, head), existingAt(step)),
    peak: (layer, head) => peaks.get(`${layer}/${head}`) || 1,
    attention: { places: [], note: "", why: "Attention patterns can be shown when the run has ended.", cells: 0 },
  };
}
