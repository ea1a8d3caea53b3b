// Colours of kinds of actions, by microbatch, and of stages and ranks; all for the light or dark ground of today.

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function isAction(work) {
  return /^\d+[FBIW]\d+$/.test(work);
}

function kindOf(work) {
  return isAction(work) ? work.match(/[FBIW]/)[0] : "other";
}

function parts(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mixed(first, last, share) {
  const [from, to] = [parts(first), parts(last)];
  return `rgb(${from.map((value, index) => Math.round(value + (to[index] - value) * share)).join(" ")})`;
}

function endsOf(kind) {
  return data.looks[kind][dark.matches ? "dark" : "light"];
}

function actionColour(kind, microbatch, numMicrobatches) {
  const [first, last] = endsOf(kind);
  return mixed(first, last, numMicrobatches > 1 ? microbatch / (numMicrobatches - 1) : 0);
}

function gradientOf(kind) {
  return `linear-gradient(90deg, ${endsOf(kind).join(", ")})`;
}

// From blue over green to orange, from the first to the last.
function placeColour(place, count) {
  const hue = 214 - 190 * (count > 1 ? place / (count - 1) : 0);
  return dark.matches ? `hsl(${hue} 42% 66%)` : `hsl(${hue} 48% 66%)`;
}

// The same, dark enough for a thin line.
function lineColour(place, count) {
  const hue = 214 - 190 * (count > 1 ? place / (count - 1) : 0);
  return dark.matches ? `hsl(${hue} 60% 66%)` : `hsl(${hue} 62% 42%)`;
}

// The colours of the style sheet.
function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "ink", "muted", "line", "faint", "row", "accent", "danger"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
