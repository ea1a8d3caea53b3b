// Mouse, touch and keyboard on the canvases of a chart.

const CLICK_PIXELS = 4;  // a pointer that has moved less has clicked

function listen(chart, tell) {
  for (const canvas of [chart.actions, chart.kept]) {
    if (!canvas) continue;
    listenToWheel(canvas, chart);
    listenToPointer(canvas, chart, tell);
    canvas.addEventListener("keydown", (event) => onKey(event, chart, tell));
    canvas.addEventListener("pointerleave", hideTip);
  }
}

function listenToWheel(canvas, chart) {
  canvas.addEventListener("wheel", (event) => {
    const area = chart.areaOf(canvas, TOP);
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isSideways && event.deltaY > 0 && timeWindow.isWhole) return;  // nothing more to see: the page scrolls
    event.preventDefault();
    const delta = isSideways ? event.deltaX || event.deltaY : event.deltaY;
    if (isSideways) timeWindow.move(delta / area.width);
    else timeWindow.zoom(Math.exp(Math.max(-60, Math.min(60, delta)) * 0.004), (event.offsetX - area.left) / area.width);
  }, { passive: false });
}

function listenToPointer(canvas, chart, tell) {
  let pressed = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressed = { x: event.offsetX, start: timeWindow.start, end: timeWindow.end, hasMoved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pressed) return void showTip(event, canvas, chart);
    const moved = event.offsetX - pressed.x;
    pressed.hasMoved ||= Math.abs(moved) > CLICK_PIXELS;
    if (!pressed.hasMoved) return;
    canvas.classList.add("moving");
    hideTip();
    const shift = (moved / chart.areaOf(canvas, TOP).width) * (pressed.end - pressed.start);
    const start = Math.min(Math.max(pressed.start - shift, WHOLE.start), WHOLE.end - (pressed.end - pressed.start));
    timeWindow.show(start, start + pressed.end - pressed.start);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      canvas.classList.remove("moving");
      if (name === "pointerup" && pressed && !pressed.hasMoved && canvas === chart.actions) {
        const found = chart.at(event.offsetX, event.offsetY);
        chart.follow(found?.rank ?? null, found?.index ?? null);
        tell(chart);
      }
      pressed = null;
    });
  }
}

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const WINDOW_KEYS = {
  "+": (chart) => chart.zoom(1 / 1.5),
  "=": (chart) => chart.zoom(1 / 1.5),
  "-": (chart) => chart.zoom(1.5),
  "0": () => timeWindow.show(WHOLE.start, WHOLE.end),
};

function onKey(event, chart, tell) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const move = MOVES[event.key];
  if (event.shiftKey && move?.[1]) timeWindow.move(0.15 * move[1]);
  else if (move) step(chart, ...move);
  else if (event.key in WINDOW_KEYS) WINDOW_KEYS[event.key](chart);
  else if (event.key === "Escape") chart.follow(null, null);
  else return;
  event.preventDefault();
  tell(chart);
}

// To the next action of the rank, or to the action of another rank at about the same time.
function step(chart, byRank, byIndex) {
  const ranks = chart.timeline.ranks;
  const at = chart.chosenAt;
  if (!at) return void chart.follow(0, Math.min(firstAfter(ranks[0].blocks, timeWindow.start), ranks[0].blocks.length - 1));
  const rank = Math.max(0, Math.min(ranks.length - 1, at.rank + byRank));
  const blocks = ranks[rank].blocks;
  const middle = (chart.chosen.start + chart.chosen.end) / 2;
  const index = byRank ? firstAfter(blocks, middle) : at.index + byIndex;
  if (blocks.length) chart.follow(rank, Math.max(0, Math.min(blocks.length - 1, index)));
}

function factsOf(chart, rank, block) {
  const facts = [wordsOf(block), `rank ${chart.timeline.ranks[rank].number}, from ${humanSeconds(block.start, 5)}, takes ${humanSeconds(block.end - block.start, 4)}`];
  const kept = keptAt(chart.timeline.ranks[rank], block.end);
  if (kept !== null) facts.push(`then ${humanBytes(kept)} in memory`);
  if (block.isCritical) facts.push("on the critical path");
  return facts;
}

function showTip(event, canvas, chart) {
  const lines = canvas === chart.actions ? actionLines(event, chart) : keptLines(event, chart);
  if (!lines) return hideTip();
  const tip = byId("tip");
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}

function actionLines(event, chart) {
  const found = chart.at(event.offsetX, event.offsetY);
  return found && factsOf(chart, found.rank, found.block);
}

// Of the rank whose line is nearest.
function keptLines(event, chart) {
  const area = chart.areaOf(chart.kept, 8);
  const seconds = area.seconds(event.offsetX);
  if (event.offsetX < area.left || seconds > chart.timeline.end) return null;
  const pointed = keptTop(chart.timeline) * (1 - (event.offsetY - area.top) / area.height);
  const known = chart.timeline.ranks.map((rank, index) => ({ index, bytes: keptAt(rank, seconds) })).filter((each) => each.bytes !== null);
  const candidates = chart.keptRank === null ? known : known.filter((each) => each.index === chart.keptRank);
  if (!candidates.length) return null;
  const nearest = candidates.reduce((one, other) => (Math.abs(other.bytes - pointed) < Math.abs(one.bytes - pointed) ? other : one));
  return [`rank ${chart.timeline.ranks[nearest.index].number}: ${humanBytes(nearest.bytes)} at ${humanSeconds(seconds, 4)}`];
}

function hideTip() {
  byId("tip").hidden = true;
}
