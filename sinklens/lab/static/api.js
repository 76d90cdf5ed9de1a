// Requests to the lab's server, and the numbers in its answers.

const REFUSED = { 401: "This page has lost its token. Open the address that the lab printed.", 429: "The queue is full; wait for a run to end, or stop one." };

async function ask(path, body, method) {
  const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(path, { method: method || (body === undefined ? "GET" : "POST"), ...sent });
  } catch {
    throw new Error("The lab does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(said.error || REFUSED[answer.status] || `The lab answered ${answer.status}.`), { status: answer.status, chip: said.chip });
}

const askJson = async (path, body, method) => (await ask(path, body, method)).json();

function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return bytes.buffer;
}

// Half-precision numbers as floats.
let halves = null;
function floatsOf(buffer) {
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, rest = bits & 1023;
    if (exponent === 31) return rest ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024));
  });
  return Float32Array.from(new Uint16Array(buffer), (bits) => halves[bits]);
}
