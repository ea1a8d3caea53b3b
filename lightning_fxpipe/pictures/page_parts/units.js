// Numbers as people read them, as the package's tables have them.

function scaled(value, factor, units, text) {
  let unit = "";
  for (unit of units) {
    value /= factor;
    if (Number(text(value)) < factor) break;
  }
  return `${text(value)} ${unit}`;
}

function humanBytes(count) {
  if (count < 1024) return `${Math.round(count)} B`;
  return scaled(count, 1024, ["KiB", "MiB", "GiB", "TiB"], (value) => value.toFixed(1));
}

function humanCount(count) {
  if (count < 1000) return String(count);
  return scaled(count, 1000, ["K", "M", "B"], (value) => String(Number(value.toPrecision(3))));
}

const TIME_UNITS = [[1, "s"], [1e3, "ms"], [1e6, "\u00b5s"], [1e9, "ns"]];

function humanSeconds(seconds, digits = 3) {
  if (seconds === 0) return "0 s";
  const [factor, unit] = TIME_UNITS.find(([times]) => Math.abs(seconds) * times >= 0.9995) || TIME_UNITS.at(-1);
  const value = seconds * factor;
  return `${Math.abs(value) >= 999.5 ? value.toFixed(0) : Number(value.toPrecision(digits))} ${unit}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function counted(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

// Round numbers from start to end, about as many as wished for: multiples of 1, 2 or 5 times a power of ten.
function ticks(start, end, wished, base = 10) {
  const least = (end - start) / Math.max(1, wished);
  const power = base ** Math.floor(Math.log(least) / Math.log(base) + 1e-9);
  const step = power * ((base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]).find((each) => each * power >= least));
  const found = [];
  for (let index = Math.ceil(start / step - 1e-9); index * step <= end + step * 1e-9; index++) found.push(index * step);
  return { step, found };
}
