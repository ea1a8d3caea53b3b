// Draws what ranks have in memory over time: a line for each rank, and the limit.

const KEPT_HEIGHT = 150;

// The highest value of the plot. A limit far above all of them would leave no room for them, and is told in words.
function keptTop(timeline) {
  const limit = data.memoryLimitBytes;
  const most = Math.max(1, timeline.peak.bytes);
  return limit !== null && limit < 4 * most ? 1.08 * Math.max(limit, most) : 1.12 * most;
}

function drawKept(pen, chart, area, theme) {
  const top = keptTop(chart.timeline);
  const y = (bytes) => area.top + area.height * (1 - bytes / top);
  drawByteAxis(pen, area, top, y, theme);
  pen.save();
  pen.beginPath();
  pen.rect(area.left, area.top - 2, area.width, area.height + 4);
  pen.clip();
  const ranks = chart.timeline.ranks;
  const only = chart.keptRank;
  pen.lineWidth = ranks.length > 16 ? 1 : 1.6;
  ranks.forEach((rank, index) => {
    pen.globalAlpha = only === null ? (ranks.length > 16 ? 0.65 : 0.95) : 0.15;
    if (index !== only) drawSteps(pen, rank, lineColour(index, ranks.length), area, y, chart.timeline.end);
  });
  pen.globalAlpha = 1;
  if (only !== null) {
    pen.lineWidth = 2.2;
    drawSteps(pen, ranks[only], lineColour(only, ranks.length), area, y, chart.timeline.end);
  }
  pen.restore();
  drawLimit(pen, area, top, y, theme);
}

function drawByteAxis(pen, area, top, y, theme) {
  pen.strokeStyle = theme.faint;
  pen.fillStyle = theme.muted;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const bytes of ticks(0, top, 3, 1024).found) {
    pen.beginPath();
    pen.moveTo(area.left, Math.round(y(bytes)) + 0.5);
    pen.lineTo(area.left + area.width, Math.round(y(bytes)) + 0.5);
    pen.stroke();
    pen.fillText(humanBytes(bytes).replace(".0", ""), area.left - 8, y(bytes));
  }
  pen.textAlign = "center";
}

// From each change on the new value holds, until the end of the step.
function drawSteps(pen, rank, colour, area, y, end) {
  if (!rank.keptSeconds.length) return;
  pen.strokeStyle = colour;
  pen.beginPath();
  rank.keptSeconds.forEach((seconds, index) => {
    const x = area.x(seconds);
    if (index) pen.lineTo(x, y(rank.keptBytes[index - 1]));
    else pen.moveTo(x, y(rank.keptBytes[0]));
    pen.lineTo(x, y(rank.keptBytes[index]));
  });
  pen.lineTo(area.x(end), y(rank.keptBytes.at(-1)));
  pen.stroke();
}

function drawLimit(pen, area, top, y, theme) {
  const limit = data.memoryLimitBytes;
  if (limit === null) return;
  pen.fillStyle = pen.strokeStyle = theme.danger;
  pen.textAlign = "right";
  const at = limit <= top ? y(limit) : area.top + 2;
  pen.fillText(limit <= top ? `limit ${humanBytes(limit)}` : `limit ${humanBytes(limit)}, above \u2191`, area.left + area.width - 4, at + (limit <= top ? -7 : 6));
  if (limit <= top) {
    pen.setLineDash([6, 4]);
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.moveTo(area.left, at);
    pen.lineTo(area.left + area.width, at);
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.textAlign = "center";
}

// Which line is whose: each by itself, or the first and the last of many.
function keptKey(ranks) {
  const line = (background) => element("i", { style: { background } });
  if (ranks.length <= 8) return ranks.map((rank, place) => element("span", {}, line(lineColour(place, ranks.length)), `rank ${rank.number}`));
  const colours = Array.from({ length: 9 }, (_, index) => lineColour(index, 9));
  return [element("span", {}, `rank ${ranks[0].number}`, line(`linear-gradient(90deg, ${colours})`), `rank ${ranks.at(-1).number}`)];
}

// What a rank has in memory at a time; null before the first that is known.
function keptAt(rank, seconds) {
  let found = null;
  for (let index = 0; index < rank.keptSeconds.length && rank.keptSeconds[index] <= seconds; index++) found = rank.keptBytes[index];
  return found;
}
