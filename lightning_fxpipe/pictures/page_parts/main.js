// Puts the page together.

let charts = [];
let isDrawing = false;

// At most once for each picture of the screen.
function drawSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    charts.forEach((chart) => chart.draw());
    const text = timeWindow.isWhole ? "the whole step" : `${humanSeconds(timeWindow.start, 4)} to ${humanSeconds(timeWindow.end, 4)}`;
    byId("window").textContent = text;
  });
}

function tell(chart) {
  const facts = chart.chosen ? factsOf(chart, chart.chosenAt.rank, chart.chosen) : [];
  byId("chosen").textContent = facts.join("; ");
}

function choose(index) {
  const alternative = data.alternatives[index];
  charts = alternative.timelines.map((timeline) => new Chart(timeline));
  byId("charts").replaceChildren(...charts.map((chart) => chart.element));
  byId("chosen").textContent = "";
  charts.forEach((chart) => listen(chart, tell));
  showLegend();
  drawSoon();
}

function showLegend() {
  const kinds = new Set(charts.flatMap((chart) => chart.timeline.ranks).flatMap((rank) => rank.blocks).map((block) => block.kind));
  const items = Object.keys(data.looks).filter((kind) => kinds.has(kind)).map((kind) =>
    element("li", {}, element("i", { style: { background: gradientOf(kind) } }), data.looks[kind].words));
  if (charts.some((chart) => chart.timeline.ranks.some((rank) => rank.stages.length > 1))) {
    items.push(element("li", {}, element("i", { style: { background: endsOf("F")[0], borderBottom: "3px solid #10161f80" } }), "later stage of a rank"));
  }
  if (charts.some((chart) => chart.timeline.ranks.some((rank) => rank.blocks.some((block) => block.isCritical)))) {
    items.push(element("li", {}, element("i", { style: { border: "2px solid var(--ink)" } }), "critical path"));
  }
  byId("legend").replaceChildren(...items);
}

function showSummary() {
  const facts = [];
  if (data.plan) facts.push(`${humanCount(data.plan.numParameters)} parameters in ${counted(data.plan.stages.length, "stage")}`);
  const first = data.alternatives.find((each) => each.timelines.length);
  if (first) {
    const timeline = prepared(first.timelines[0]);
    facts.push(counted(timeline.ranks.length, "rank"), counted(timeline.numMicrobatches, "microbatch").replace(/hs$/, "hes"));
  }
  if (data.replicas) facts.push(counted(data.replicas.ranks.length, "replica"));
  if (data.memoryLimitBytes !== null) facts.push(`${humanBytes(data.memoryLimitBytes)} of memory on each rank`);
  byId("summary").textContent = facts.join(" \u00b7 ");
  byId("notes").replaceChildren(...data.notes.map((note) => element("p", {}, note)));
}

function showPlan() {
  byId("stages").hidden = byId("model").hidden = !data.plan;
  showReplicas(data.replicas);
  byId("stages").classList.toggle("alone", !data.alternatives.length);
  if (!data.plan) return;
  showStages(data.plan);
  showTree(data.plan);
}

function start() {
  showSummary();
  showPlan();
  const first = data.alternatives.findIndex((each) => each.timelines.length);
  byId("schedules").hidden = !data.alternatives.length;
  byId("schedules").classList.toggle("alone", !data.plan);
  byId("time").hidden = first < 0;
  if (!data.alternatives.length) return;
  showSchedules(choose);
  if (first < 0) return;
  byId("earlier").addEventListener("click", () => timeWindow.move(-0.25));
  byId("later").addEventListener("click", () => timeWindow.move(0.25));
  byId("zoom-in").addEventListener("click", () => timeWindow.zoom(1 / 1.5));
  byId("zoom-out").addEventListener("click", () => timeWindow.zoom(1.5));
  byId("whole").addEventListener("click", () => timeWindow.show(WHOLE.start, WHOLE.end));
  timeWindow.watchers.push(drawSoon);
  window.addEventListener("resize", drawSoon);
  dark.addEventListener("change", () => {
    showPlan();
    showLegend();
    drawSoon();
  });
  document.querySelectorAll("#schedule-table input")[first].click();
}

start();
