// The plan: its stages as a table of bars, and the model as a tree of module paths.

function showStages(plan) {
  const stages = plan.stages;
  const most = Math.max(1, ...stages.map((stage) => stage.numParameters));
  const hasCosts = stages.some((stage) => "stateBytes" in stage);
  const hasSkips = stages.some((stage) => stage.skippingBytes);
  const columns = [
    ["Stage", "number"], ["First and last module"], ["Parameters", "number"], ["", "measure"],
    ...(hasCosts ? [["States", "number"], ["Keeps", "number"]] : []), ["Sends", "number"], ...(hasSkips ? [["Past the next", "number"]] : []),
  ];
  const total = Math.max(1, plan.numParameters);
  const rows = stages.map((stage, index) => row(
    cell(stageChip(index, stages.length), "number"),
    cell(element("div", {}, stage.first, ...(stage.last === stage.first ? [] : [element("span", {}, " to "), stage.last])), "paths"),
    cell(element("div", {}, humanCount(stage.numParameters), element("div", { className: "small" }, percent(stage.numParameters / total))), "number"),
    barCell(stage.numParameters / most, placeColour(index, stages.length)),
    ...(hasCosts ? [cell(humanBytes(stage.stateBytes), "number"), cell(humanBytes(stage.activationBytes), "number")] : []),
    cell(stage.numOutputs ? humanBytes(stage.outputBytes) : "\u2013", "number"),
    ...(hasSkips ? [cell(stage.skippingBytes ? humanBytes(stage.skippingBytes) : "\u2013", "number")] : []),
  ));
  byId("stage-table").replaceChildren(
    element("thead", {}, row(...columns.map(([text, className]) => heading(text, className)))), element("tbody", {}, ...rows));
  const hints = hasCosts ? ["States: parameters, gradients and what the optimizer keeps.", "Keeps: from a microbatch's forward to its backward."] : [];
  hints.push(`Sends: to later stages, for a microbatch of ${counted(plan.microbatchSize, "sample")}.`);
  if (hasSkips) hints.push("Past the next: what of it goes to a later stage directly, since the next does not use it.");
  byId("stage-hint").textContent = hints.join(" ");
}

function stageChip(index, count, text = String(index)) {
  return element("span", { className: "chip", style: { background: placeColour(index, count) } }, text);
}

// Modules in modules, with the parameters of each: { name, children, count, stages }.
function treeOf(parameters) {
  const root = newNode("(root)");
  for (const [fqn, shape, stages] of parameters) {
    const count = shape.reduce((product, size) => product * size, 1);
    let node = root;
    const names = fqn.split(".");
    names.forEach((name, depth) => {
      const isLeaf = depth === names.length - 1;
      if (!node.children.has(name)) node.children.set(name, newNode(name, isLeaf ? shape : null));
      addTo(node, count, stages);
      node = node.children.get(name);
    });
    addTo(node, count, stages);
  }
  return root;
}

function newNode(name, shape = null) {
  return { name, shape, children: new Map(), count: 0, stages: new Set(), isOnAll: false };
}

function addTo(node, count, stages) {
  node.count += count;
  stages.forEach((stage) => node.stages.add(stage));
  node.isOnAll ||= !stages.length;
}

function showTree(plan) {
  const root = treeOf(plan.parameters);
  const line = (node) => element("span", { className: "node" },
    element("span", { className: "name" }, node.name, ...(node.shape ? [element("span", { className: "small" }, `  ${node.shape.join(" \u00d7 ")}`)] : [])),
    stagesOf(node, plan.stages.length),
    element("span", { className: "share" }, element("i", { style: { width: `${100 * node.count / Math.max(1, root.count)}%` } })),
    element("span", { className: "number" }, humanCount(node.count)));
  const branch = (node, isOpen) => {
    if (!node.children.size) return element("li", {}, line(node));
    const details = element("details", {}, element("summary", {}, line(node)));
    const fill = () => {  // when it is opened: a model may have 100,000 parameters
      if (details.children.length === 1) details.append(element("ul", {}, ...[...node.children.values()].map((child) => branch(child, false))));
    };
    details.addEventListener("toggle", () => details.open && fill());
    if (isOpen) {
      fill();
      details.open = true;
    }
    return element("li", {}, details);
  };
  byId("tree").replaceChildren(element("ul", { style: { border: 0, padding: 0 } }, branch(root, true)));
  const below = byId("tree").querySelectorAll("details details");
  if (below.length === 1) below[0].open = true;
  byId("plan-text").querySelector("pre").textContent = plan.text;
}

function stagesOf(node, count) {
  const stages = [...node.stages].sort((one, other) => one - other);
  const texts = [];
  for (let from = 0, to = 0; from < stages.length; from = to) {
    for (to = from + 1; to < stages.length && stages[to] === stages[to - 1] + 1; to++);
    const text = to - from > 2 ? `${stages[from]} to ${stages[to - 1]}` : stages.slice(from, to).join(", ");
    texts.push(stageChip(stages[from], count, text));
  }
  if (texts.length > 3) texts.splice(3, texts.length, element("span", { className: "small" }, `of ${counted(stages.length, "stage")}`));
  if (node.isOnAll) texts.push(element("span", { className: "chip", style: { background: "#b4bcc8" } }, "every rank"));
  return element("span", {}, element("span", { className: "small" }, stages.length > 1 ? "stages " : stages.length ? "stage " : ""), ...texts);
}
