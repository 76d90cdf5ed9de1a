// Reads the data in the page: JSON blocks, and typed arrays, deflated and in base64.

const byId = (id) => document.getElementById(id);

const readJson = (id) => JSON.parse(byId(id).textContent);

async function readBytes(name) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This page needs DecompressionStream: Chrome 80, Firefox 113, Safari 16.4, or newer.");
  }
  const text = atob(byId("chunk-" + name).textContent);
  const packed = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const readText = async (name) => new TextDecoder().decode(await readBytes(name));

function runScript(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
}
