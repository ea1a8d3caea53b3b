// The alternatives side by side, one of which is chosen.

function peakOf(timeline) {
  const peaks = timeline.ranks.map((rank) => rank.keptBytes.reduce((most, bytes) => Math.max(most, bytes), 0));
  const bytes = Math.max(0, ...peaks);
  return { bytes, rank: timeline.ranks[peaks.indexOf(bytes)]?.number, isKnown: timeline.ranks.some((rank) => rank.keptBytes.length) };
}

function showSchedules(choose) {
  const longest = Math.max(...data.alternatives.flatMap((each) => each.timelines).map((each) => each.seconds));
  const headings = [heading("Schedule"), heading("Step", "number"), heading("", "measure"), heading("Idle", "number"), heading("Most memory", "number"), heading("Rank", "number")];
  const bodies = data.alternatives.map((alternative, index) => {
    const rows = alternative.timelines.map((timeline) => row(...resultCells(timeline, longest)));
    if (!rows.length) rows.push(row(element("td", { colSpan: 5, className: "small" }, alternative.refused)));
    rows[0].prepend(element("th", { scope: "rowgroup", rowSpan: rows.length }, choice(alternative, index, choose)));
    if (alternative.timelines.length > 1) rows.forEach((each, place) => each.cells[each.cells.length - 5].prepend(labelOf(alternative, place)));
    return element("tbody", {}, ...rows);
  });
  byId("schedule-table").replaceChildren(element("thead", {}, row(...headings)), ...bodies);
}

function labelOf(alternative, place) {
  return element("div", { className: "small" }, alternative.timelines[place].label);
}

function resultCells(timeline, longest) {
  const peak = peakOf(timeline);
  const isOver = data.memoryLimitBytes !== null && peak.bytes > data.memoryLimitBytes;
  const memory = cell(peak.isKnown ? humanBytes(peak.bytes) : "\u2013", isOver ? "number over" : "number");
  if (isOver) memory.append(element("div", { className: "small over" }, "over the limit"));
  return [
    cell(humanSeconds(timeline.seconds), "number"),
    barCell(timeline.seconds / longest, ""),
    cell(percent(timeline.idle), "number"),
    memory,
    cell(peak.isKnown ? String(peak.rank) : "\u2013", "number"),
  ];
}

function choice(alternative, index, choose) {
  const input = element("input", { type: "radio", name: "schedule", disabled: !alternative.timelines.length });
  input.addEventListener("change", () => {
    document.querySelectorAll("#schedule-table tr").forEach((each) => each.classList.remove("chosen"));
    for (const each of input.closest("tbody").rows) each.classList.add("chosen");
    choose(index);
  });
  return element("label", {}, input, alternative.name);
}
