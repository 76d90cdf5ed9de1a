// Draws the first view, then everything that can wait.

async function start() {
  buildHeader();
  const kinds = { entered: Uint32Array, left: Uint32Array, committed: Uint8Array, path: Int32Array, heads: Uint16Array, strength: Float32Array };
  await Promise.all(Object.entries(kinds).map(async ([name, kind]) => { data[name] = new kind(await readBytes(name)); }));
  buildControls();
  buildTokens();
  buildFigures();
  await choose(...info.start);
  requestAnimationFrame(() => setTimeout(() => performance.mark("first-view"), 0));
  startAttention();
}

start().catch(fail);
