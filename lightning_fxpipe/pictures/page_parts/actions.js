// Draws what each rank does: a row for each, with a block for each action in the window.

const GUTTER = 58;  // left of all plots, for labels
const MARGIN = 14;  // right of them
const LABEL_INK = "#10161f";
const LABEL_SIZES = [12, 10.5, 9];
const NAME_PIXELS = 46;
const FAINT_ALPHA = 0.22;

function rowHeight(numRanks) {
  return [[4, 34], [8, 28], [16, 22], [32, 16], [64, 12]].find(([most]) => numRanks <= most)?.[1] ?? 8;
}

// What drawing needs to know of a timeline, found out once.
function prepared(timeline) {
  const stages = new Set();
  let numMicrobatches = 1;
  const ranks = timeline.ranks.map((rank) => {
    const own = new Set();
    const blocks = rank.work.map((work, index) => {
      const kind = kindOf(work);
      const [stage, microbatch] = kind === "other" ? [-1, -1] : work.split(/[FBIW]/).map(Number);
      if (stage >= 0) own.add(stage);
      numMicrobatches = Math.max(numMicrobatches, microbatch + 1);
      return { work, kind, stage, microbatch, start: rank.starts[index], end: rank.ends[index], isCritical: false };
    });
    rank.critical.forEach((index) => { blocks[index].isCritical = true; });
    own.forEach((stage) => stages.add(stage));
    return { number: rank.number, blocks, stages: [...own].sort((one, other) => one - other), keptSeconds: rank.keptSeconds, keptBytes: rank.keptBytes };
  });
  const end = Math.max(0, ...ranks.map((rank) => rank.blocks.at(-1)?.end ?? 0));
  return { ...timeline, ranks, numMicrobatches, numStages: stages.size, end, peak: peakOf(timeline) };
}

// The first block that ends after a time.
function firstAfter(blocks, seconds) {
  let [low, high] = [0, blocks.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (blocks[middle].end <= seconds) low = middle + 1;
    else high = middle;
  }
  return low;
}

function wordsOf(block) {
  return block.kind === "other" ? block.work : `${block.work}: ${data.looks[block.kind].words} of stage ${block.stage}, microbatch ${block.microbatch}`;
}

// A faint ground for every other rank.
function drawBands(pen, numRanks, area, theme) {
  pen.fillStyle = theme.row;
  for (let rank = 0; rank < numRanks; rank += 2) pen.fillRect(area.left, area.top + rank * area.rowHeight, area.width, area.rowHeight);
}

function drawActions(pen, chart, area, theme) {
  const { timeline } = chart;
  const palette = paletteOf(timeline);
  const height = area.rowHeight;
  const hasNames = areWide(timeline, area);
  timeline.ranks.forEach((rank, index) => {
    const top = area.top + index * height;
    drawRank(pen, chart, rank, { ...area, hasNames, top: top + (height > 12 ? 2 : 1), height: height - (height > 12 ? 4 : 2) }, palette, theme);
  });
}

// Whether all actions in the window have room for a whole name, such as 3F12.
function areWide(timeline, area) {
  return timeline.ranks.every(({ blocks }) => {
    for (let index = firstAfter(blocks, timeWindow.start); index < blocks.length && blocks[index].start < timeWindow.end; index++) {
      const block = blocks[index];
      if (block.kind !== "other" && area.x(block.end) - area.x(block.start) < NAME_PIXELS) return false;
    }
    return true;
  });
}

function paletteOf(timeline) {
  const palette = { other: [actionColour("other", 0, 1)] };
  for (const kind of "FBIW") {
    palette[kind] = Array.from({ length: timeline.numMicrobatches }, (_, microbatch) => actionColour(kind, microbatch, timeline.numMicrobatches));
  }
  return palette;
}

function drawRank(pen, chart, rank, area, palette, theme) {
  const { chosen } = chart;
  const outlined = [];
  let drawnTo = -1;
  for (let index = firstAfter(rank.blocks, timeWindow.start); index < rank.blocks.length; index++) {
    const block = rank.blocks[index];
    if (block.start >= timeWindow.end) break;
    const [x0, x1] = [area.x(block.start), area.x(block.end)];
    if (x1 - x0 < 0.5 && x1 < drawnTo + 0.5) continue;  // too short to be seen beside the one before
    drawnTo = x1;
    const width = Math.max(0.6, x1 - x0 - (x1 - x0 > 8 ? 1 : x1 - x0 > 3 ? 0.5 : 0));
    const isFollowed = !chosen || chosen.microbatch === block.microbatch;
    pen.globalAlpha = isFollowed ? 1 : FAINT_ALPHA;
    pen.fillStyle = palette[block.kind][Math.max(0, block.microbatch)];
    pen.fillRect(x0, area.top, width, area.height);
    drawPlace(pen, rank, block, x0, width, area);
    drawLabel(pen, rank, block, x0, width, area);
    if (block.isCritical && isFollowed) outlined.push([x0, width]);
  }
  pen.globalAlpha = 1;
  outline(pen, outlined, area, theme);
}

// A stripe for the later stages of a rank that has several.
function drawPlace(pen, rank, block, x, width, area) {
  const place = rank.stages.indexOf(block.stage);
  if (place < 1) return;
  pen.fillStyle = LABEL_INK;
  const share = place / Math.max(1, rank.stages.length - 1);
  const height = Math.max(1.5, area.height * 0.16);
  const alpha = pen.globalAlpha;
  pen.globalAlpha = alpha * (0.25 + 0.35 * share);
  pen.fillRect(x, area.top + area.height - height, width, height);
  pen.globalAlpha = alpha;
}

function drawLabel(pen, rank, block, x, width, area) {
  if (area.height < 10 || width < 9) return;
  const [from, to] = [Math.max(x, area.left), Math.min(x + width, area.left + area.width)];
  const text = block.kind === "other" || area.hasNames ? block.work : String(block.microbatch);
  const size = LABEL_SIZES.find((each) => each < area.height && widthOf(pen, text, each) <= to - from - 2);
  if (!size) return;
  pen.fillStyle = LABEL_INK;
  pen.fillText(text, (from + to) / 2, area.top + area.height / 2 + 0.5);
}

function widthOf(pen, text, size) {
  pen.font = `${size}px system-ui, "Liberation Sans", sans-serif`;
  return pen.measureText(text).width;
}

// The critical path; where its blocks are too short for an outline, a line below them.
function outline(pen, blocks, area, theme) {
  pen.strokeStyle = pen.fillStyle = theme.ink;
  pen.lineWidth = 1.6;
  for (const [x, width] of blocks) {
    if (width >= 7) pen.strokeRect(x + 0.8, area.top + 0.8, width - 1.6, area.height - 1.6);
    else {
      pen.fillRect(x, area.top, width, 1.2);
      pen.fillRect(x, area.top + area.height - 1.2, width, 1.2);
    }
  }
}
