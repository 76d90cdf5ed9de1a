// Requests to the lab's server, the stream of its events, and the numbers in its answers.
//
// In a tab a cookie stands for the token. In the frame of a notebook, which gets no cookie, the page holds the token and
// sends it with every request as a header.

const TOKEN = document.querySelector("meta[name=sinklens-token]").content;
// Behind a reverse proxy the lab is below a path of another host.
const addressOf = (path) => new URL(path.replace(/^\//, ""), new URL(".", location.href)).href;
const credentials = () => (TOKEN ? { "X-Sinklens-Token": TOKEN } : {});

const REFUSED = { 429: "The queue is full; wait for a run to end, or stop one." };

// Jupyter's proxy passes events on as they come only if nothing else is accepted.
async function ask(path, body, method, accepted) {
  const kind = body === undefined ? {} : { "Content-Type": "application/json" };
  const sent = { headers: { ...kind, ...(accepted ? { Accept: accepted } : {}), ...credentials() }, ...(body === undefined ? {} : { body: JSON.stringify(body) }) };
  let answer;
  try {
    answer = await fetch(addressOf(path), { method: method || (body === undefined ? "GET" : "POST"), ...sent });
  } catch {
    throw new Error("The lab is not responding. Is it still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(said.error || REFUSED[answer.status] || `The lab answered ${answer.status}.`), { status: answer.status, chip: said.chip });
}

const askJson = async (path, body, method) => (await ask(path, body, method)).json();

// Reads the events after `since` for as long as the page is open; `lost` is called with each failure.
async function followEvents(since, { receive, lost, opened }) {
  for (;;) {
    try {
      const reader = (await ask(`/api/events?since=${since}`, undefined, "GET", "text/event-stream")).body.pipeThrough(new TextDecoderStream()).getReader();
      opened();
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const { id, event, data } = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
          if (!event) continue;
          since = Number(id);
          receive(event, JSON.parse(data));
        }
      }
      lost();
    } catch (error) {
      lost(error);
    }
    await new Promise((resume) => setTimeout(resume, 1000));
  }
}

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
