// One timeline: its heading, a canvas of actions and, where it is known, one of what is kept.

const TOP = 24;  // of a canvas, for the axis

class Chart {
  constructor(timeline) {
    this.timeline = prepared(timeline);
    this.chosen = null;   // a block whose microbatch is followed
    this.chosenAt = null; // its rank and index
    this.keptRank = null; // the rank whose memory is singled out
    const numRanks = this.timeline.ranks.length;
    this.actions = this.#canvas(TOP + numRanks * rowHeight(numRanks) + 4,
      `${timeline.label}: what ${counted(numRanks, "rank")} do. Arrow keys go from action to action.`);
    this.kept = this.timeline.peak.isKnown ? this.#canvas(KEPT_HEIGHT, `${timeline.label}: memory of each rank over time`) : null;
    const facts = `${humanSeconds(timeline.seconds)}, ${percent(timeline.idle)} idle`;
    this.element = element("div", { className: "chart" },
      element("h3", {}, timeline.label, " ", element("span", { className: "small" }, facts)),
      this.actions, ...(this.kept ? [this.#keptBar(), this.kept] : []));
  }

  #canvas(height, label) {
    return element("canvas", { tabIndex: 0, role: "application", "aria-label": label, style: { height: `${height}px` } });
  }

  #keptBar() {
    const names = ["all ranks", ...this.timeline.ranks.map((rank) => `rank ${rank.number}`)];
    this.keptChoice = element("select", {}, ...names.map((name, index) => element("option", { value: String(index - 1) }, name)));
    this.keptChoice.addEventListener("change", () => this.singleOut(Number(this.keptChoice.value)));
    this.keptKey = element("span", { className: "key small" });
    return element("div", { className: "bar kept" }, element("label", { className: "small" }, "Memory of ", this.keptChoice), this.keptKey);
  }

  // A rank's memory; -1 for that of all.
  singleOut(rank) {
    this.keptRank = rank < 0 ? null : rank;
    this.draw();
  }

  follow(rank, index) {
    this.chosen = index === null ? null : this.timeline.ranks[rank].blocks[index];
    this.chosenAt = index === null ? null : { rank, index };
    if (this.chosen) timeWindow.reveal(this.chosen.start, this.chosen.end);
    this.draw();
  }

  // Zooms around the chosen action, or in the middle.
  zoom(factor) {
    const middle = this.chosen ? (this.chosen.start + this.chosen.end) / 2 : NaN;
    const share = (middle - timeWindow.start) / (timeWindow.end - timeWindow.start);
    timeWindow.zoom(factor, share >= 0 && share <= 1 ? share : 0.5);
  }

  // The plot of a canvas, with the place of each time in it.
  areaOf(canvas, top) {
    const left = GUTTER;
    const width = Math.max(50, canvas.clientWidth - left - MARGIN);
    const scale = width / (timeWindow.end - timeWindow.start);
    const numRanks = this.timeline.ranks.length;
    return {
      left, top, width, height: canvas.clientHeight - top - 4, rowHeight: rowHeight(numRanks),
      x: (seconds) => left + (seconds - timeWindow.start) * scale,
      seconds: (x) => timeWindow.start + (x - left) / scale,
    };
  }

  draw() {
    if (!this.element.isConnected) return;
    const theme = themeColours();
    const pen = penOf(this.actions);
    const area = this.areaOf(this.actions, TOP);
    drawBands(pen, this.timeline.ranks.length, area, theme);
    drawTimeAxis(pen, area, theme);
    drawRankNames(pen, area, this.timeline.ranks, theme);
    pen.save();
    pen.beginPath();
    pen.rect(area.left, area.top, area.width, area.height);
    pen.clip();
    drawActions(pen, this, area, theme);
    this.#markChosen(pen, area, theme);
    pen.restore();
    drawEnd(pen, area, this.timeline.end, theme);
    this.keptKey?.replaceChildren(...keptKey(this.timeline.ranks));
    if (this.kept) drawKept(penOf(this.kept), this, this.areaOf(this.kept, 8), theme);
  }

  #markChosen(pen, area, theme) {
    if (!this.chosen) return;
    pen.strokeStyle = theme.danger;
    pen.lineWidth = 2;
    const width = Math.max(3, area.x(this.chosen.end) - area.x(this.chosen.start));
    pen.strokeRect(area.x(this.chosen.start), area.top + this.chosenAt.rank * area.rowHeight + 1, width, area.rowHeight - 2);
  }

  // The action under a point of the canvas; null for none.
  at(x, y) {
    const area = this.areaOf(this.actions, TOP);
    const rank = Math.floor((y - area.top) / area.rowHeight);
    const blocks = this.timeline.ranks[rank]?.blocks;
    if (!blocks || x < area.left) return null;
    const index = firstAfter(blocks, area.seconds(x));
    return blocks[index]?.start <= area.seconds(x) ? { rank, index, block: blocks[index] } : null;
  }
}

// A canvas made ready to be drawn on, in pixels of the style sheet.
function penOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((size) => Math.round(size * ratio));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = '11.5px system-ui, "Liberation Sans", sans-serif';
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  return pen;
}
