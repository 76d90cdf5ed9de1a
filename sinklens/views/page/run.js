// The run on the page, the selection (step, layer, head, position), and what the figures ask about a run.
//
// A run is an object: `info` (sizes and vocabulary), `data` (arrays of all steps), `held` (layers with scores), and
// functions: `load(layer)` makes a layer's scores available, `score`, `sink` and `peak` read them. `packedRun` reads
// the numbers of a finished run as sinklens.views.report_data packs them.

const ALL = -1; // as layer: the mean over all heads of all layers; as head: the mean over the heads of the layer
const MISSING = 0, MASK = 1; // indices in the vocabulary: a position that does not exist yet, the mask
const KINDS = { entered: Uint32Array, left: Uint32Array, committed: Uint8Array, path: Int32Array, heads: Uint16Array, strength: Float32Array };

const view = { step: 0, layer: ALL, head: ALL, coming: null, position: null, playing: null, wish: null };
let run, info, data, T, P, H, L;

function useRun(next) {
  run = next;
  ({ info, data } = next);
  [T, P, H, L] = [info.steps.length, info.positions, info.heads, info.layers];
}

const rowOf = (head) => (head === ALL ? 0 : head + 1);

// A finished run; `read(layer)` returns { scores, sinks, peaks } of a layer, the first two as bytes.
function packedRun(info, data, read) {
  const layers = new Map(), T = info.steps.length, P = info.positions;
  const placeOf = (step, at, head) => (rowOf(head) * T + step) * P + at;
  return {
    info, data, held: info.held,
    async load(layer) {
      if (layers.has(layer)) return;
      const { scores, sinks, peaks } = await read(layer);
      const kind = info.levels > 255 ? Uint16Array : Uint8Array;
      layers.set(layer, { scores: new kind(scores), sinks: new Uint8Array(sinks), peaks });
    },
    score(step, at, layer, head) {
      const from = layers.get(layer);
      return from.peaks[rowOf(head)] * (from.scores[placeOf(step, at, head)] / info.levels) ** 2;
    },
    sink(step, at, layer, head) {
      const bit = placeOf(step, at, head);
      return (layers.get(layer).sinks[bit >> 3] >> (7 - (bit & 7))) & 1;
    },
    peak: (layer, head) => layers.get(layer).peaks[rowOf(head)],
  };
}

// ---- what the figures ask

const exists = (step, at) => data.entered[step * P + at] !== MISSING;
const committed = (step, at) => data.committed[step * P + at] === 1;
const tokenAt = (step, at) => (committed(step, at) ? data.left : data.entered)[step * P + at];
const textAt = (step, at) => info.vocabulary[tokenAt(step, at)];
const numberOf = (at) => info.first + at;
const scoreAt = (step, at, layer = view.layer, head = view.head) => run.score(step, at, layer, head);
const isSink = (step, at, layer = view.layer, head = view.head) => run.sink(step, at, layer, head);
const peakNow = () => run.peak(view.layer, view.head);
const has = (layer) => layer === ALL || run.held.includes(layer);
const existing = (step) => { let n = 0; for (let at = 0; at < P; at++) n += exists(step, at); return n; };

// Position of the strongest key; null where all attention is zero.
function strongestAt(step, layer = view.layer, head = view.head) {
  const column = layer === ALL ? 0 : head === ALL ? 1 + layer : 1 + L + layer * H + head;
  const at = data.path[step * (1 + L + L * H) + column];
  return at < 0 ? null : at;
}

function whose(layer = view.layer, head = view.head) {
  if (layer === ALL) return `the mean of all ${L * H} heads`;
  return head === ALL ? `the mean of the ${H} heads of layer ${layer}` : `layer ${layer}, head ${head}`;
}

// Description of a position at a step, by default the step shown.
function describe(at, step = view.step) {
  const token = quoted(textAt(step, at) || "…"), place = ["position ", strong(numberOf(at)), " ", token];
  if (!exists(step, at)) return [...place, committed(step, at) ? " is added in this step" : " does not exist yet"];
  const score = scoreAt(step, at), share = (100 * score) / existing(step);
  const state = committed(step, at) ? ", decided in this step" : tokenAt(step, at) === MASK ? ", undecided" : "";
  const heads = data.heads[step * P + at];
  return [...place, " receives ", strong(short(score)), ` (${short(share)} % of all attention)`,
    isSink(step, at) ? ", a sink" : "", `; a sink in ${heads} of ${count(L * H, "head")}`, state];
}

// Tells the page around this one what was clicked: a step, layer and head (null: a mean), a query and a key (null: none).
function tell(step, layer, head, query, key) {
  if (parent === window) return;
  const named = (number) => (number === ALL ? null : number);
  parent.postMessage({ sinklens: "selection", selection: { step, layer: named(layer), head: named(head), query, key } }, "*");
}
