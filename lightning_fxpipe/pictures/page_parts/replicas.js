// Replicas: for each the ranks that have its stages; the ranks of a column average their gradients.

function showReplicas(grid) {
  byId("replicas").hidden = !grid;
  if (!grid) return;
  const count = grid.stages.flat().length;
  const hasMachines = grid.machines.length > 0;
  const chips = (stages) => element("th", { scope: "col", className: "number" }, stages.length > 1 ? "stages " : "stage ", ...stages.map((stage) => stageChip(stage, count)));
  const head = row(heading("Replica"), ...(hasMachines ? [heading("Machine", "number")] : []), ...grid.stages.map(chips));
  const rows = grid.ranks.map((ranks, replica) => row(
    element("th", { scope: "row" }, String(replica)),
    ...(hasMachines ? [cell(grid.machines[replica].join(", "), "number")] : []),
    ...ranks.map((rank) => cell(String(rank), "number")),
  ));
  const foot = grid.gradientBytes.length ? [element("tfoot", {}, row(
    element("th", { scope: "row", colSpan: hasMachines ? 2 : 1 }, "Averaged"), ...grid.gradientBytes.map((bytes) => cell(humanBytes(bytes), "number")),
  ))] : [];
  byId("replica-table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows), ...foot);
  const hints = ["The numbers are global ranks. Timelines show the ranks of replica 0.", "Replicas train on different batches. The ranks of a column average their gradients once for each step of the optimizer, when their stages' backward passes are done."];
  if (grid.gradientBytes.length) hints.push("Averaged: bytes of the gradients of each rank.");
  byId("replica-hint").textContent = hints.join(" ");
}
