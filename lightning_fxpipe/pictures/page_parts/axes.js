// Draws the axis of time above a plot, its grid, and the names of ranks beside it.

function drawTimeAxis(pen, area, theme) {
  const { step, found } = ticks(timeWindow.start, timeWindow.end, area.width / 95);
  const [factor, unit] = TIME_UNITS.find(([times]) => timeWindow.end * times >= 0.9995) || TIME_UNITS.at(-1);
  const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  pen.strokeStyle = theme.line;
  pen.fillStyle = theme.muted;
  pen.lineWidth = 1;
  for (const seconds of found) {
    const x = Math.round(area.x(seconds)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, area.top - 5);
    pen.lineTo(x, area.top + area.height);
    pen.stroke();
    const text = `${(seconds * factor).toFixed(digits)} ${unit}`;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(x, area.left + area.width + MARGIN - half - 1), area.top - 13);
  }
}

function drawRankNames(pen, area, ranks, theme) {
  pen.fillStyle = theme.muted;
  pen.textAlign = "right";
  const every = area.rowHeight < 11 ? 4 : 1;
  for (let place = 0; place < ranks.length; place += every) {
    const text = area.rowHeight >= 16 ? `rank ${ranks[place].number}` : String(ranks[place].number);
    pen.fillText(text, area.left - 8, area.top + (place + 0.5) * area.rowHeight + 0.5);
  }
  if (area.rowHeight < 16) {
    pen.textAlign = "left";
    pen.fillText("rank", 0, area.top - 13);
  }
  pen.textAlign = "center";
}

// Where the step is over.
function drawEnd(pen, area, seconds, theme) {
  if (seconds < timeWindow.start || seconds > timeWindow.end) return;
  const x = Math.min(Math.round(area.x(seconds)) + 0.5, area.left + area.width - 0.5);
  pen.strokeStyle = theme.muted;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(x, area.top);
  pen.lineTo(x, area.top + area.height);
  pen.stroke();
  pen.setLineDash([]);
}
