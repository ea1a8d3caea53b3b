// The part of the step that all timelines show. All alternatives have the same scale, so that the shorter one looks shorter.

const spans = data.alternatives.flatMap((each) => each.timelines).flatMap((each) => each.ranks);
const WHOLE = {
  start: Math.min(0, ...spans.map((rank) => rank.starts[0] ?? 0)),
  end: Math.max(...spans.map((rank) => rank.ends.reduce((most, end) => Math.max(most, end), 0)), 1e-12),
};
const LEAST_SHARE = 1e-5;

const timeWindow = {
  start: WHOLE.start,
  end: WHOLE.end,
  watchers: [],

  get isWhole() {
    return this.start === WHOLE.start && this.end === WHOLE.end;
  },

  show(start, end) {
    const whole = WHOLE.end - WHOLE.start;
    const length = Math.min(whole, Math.max(end - start, whole * LEAST_SHARE));
    this.start = Math.min(Math.max(start, WHOLE.start), WHOLE.end - length);
    this.end = this.start + length;
    if (length === whole) this.end = WHOLE.end;
    this.watchers.forEach((watcher) => watcher());
  },

  // At a share of the width everything stays where it is.
  zoom(factor, share = 0.5) {
    const at = this.start + (this.end - this.start) * share;
    this.show(at - (at - this.start) * factor, at + (this.end - at) * factor);
  },

  // By a share of what is seen.
  move(share) {
    const length = this.end - this.start;
    const start = Math.min(Math.max(this.start + share * length, WHOLE.start), WHOLE.end - length);
    this.show(start, start + length);
  },

  // As little as it takes to see all of something, with room around it.
  reveal(start, end) {
    const length = Math.max(this.end - this.start, 2 * (end - start));
    const room = length * 0.05;
    if (start < this.start) this.show(start - room, start - room + length);
    else if (end > this.end) this.show(end + room - length, end + room);
  },
};
