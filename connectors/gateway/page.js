// The live page: follows the gateway's WebSocket (the messages are described in messages.py) and keeps the cards up to date in place, so that
// what somebody has selected or scrolled to stays. Every text goes in as text, never as markup.

const PROMISE_MS = 300; // 95 of 100 frames are answered within this
const DOUBTFUL = 0.6; // segments with less confidence are marked
const LINES_KEPT = 200; // of each channel
const RETRY_FIRST_MS = 400;
const RETRY_MOST_MS = 8_000;
const SILENCE_MS = 10_000; // latencies come every second: a connection that is silent this long is dead
const FOLLOW_PX = 48; // a reader this close to the end wants to see the newest text

const byId = (id) => document.getElementById(id);
const cloneOf = (id) => byId(id).content.firstElementChild.cloneNode(true);
const inOrder = new Intl.Collator(undefined, { numeric: true }).compare;

/** Sets an attribute or text only where it differs: an untouched node keeps its selection. */
function setText(element, text) {
  const node = element.firstChild ?? element.appendChild(document.createTextNode(""));
  const old = node.data;
  if (old === text) return;
  let start = 0;
  while (start < old.length && start < text.length && old[start] === text[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < text.length - start && old.at(-1 - end) === text.at(-1 - end)) end += 1;
  node.replaceData(start, old.length - start - end, text.slice(start, text.length - end));
}

function duration(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1_000));
  const minutes = Math.floor(seconds / 60);
  const pad = (number) => String(number).padStart(2, "0");
  return minutes < 60 ? `${minutes}:${pad(seconds % 60)}` : `${Math.floor(minutes / 60)}:${pad(minutes % 60)}:${pad(seconds % 60)}`;
}

function age(ms) {
  const seconds = Math.floor(ms / 1_000);
  if (seconds < 2) return "just now";
  return seconds < 60 ? `${seconds} s ago` : seconds < 3_600 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3_600)} h ago`;
}

function setLatency(element, ms) {
  setText(element, ms === null ? "–" : `${Math.round(ms)} ms`);
  element.classList.toggle("late", ms !== null && ms > PROMISE_MS);
}

/** A segment: grey while it is open, black when it is finished; the same nodes throughout. */
class Line {
  constructor(startMs) {
    this.startMs = startMs;
    this.element = cloneOf("line-template");
    this.text = this.element.querySelector(".text");
    setText(this.element.querySelector("time"), duration(startMs));
    this.isFinal = false;
  }

  showPartial(partial) {
    this.element.setAttribute("aria-busy", "true");
    setText(this.text, partial.text);
    this.element.hidden = partial.text === "";
  }

  showFinal(segment) {
    this.isFinal = true;
    setText(this.text, segment.text);
    this.element.hidden = segment.text === "";
    if (segment.language) this.element.lang = segment.language;
    this.element.querySelector(".confidence").style.setProperty("--share", segment.confidence);
    this.element.toggleAttribute("data-doubtful", segment.confidence < DOUBTFUL);
    this.element.title = `${duration(segment.start_ms)} – ${duration(segment.end_ms)}, confidence ${Math.round(segment.confidence * 100)} %`;
    if (segment.refined && segment.refined !== segment.text) {
      const refined = this.element.querySelector(".refined") ?? this.element.appendChild(document.createElement("p"));
      refined.className = "refined";
      refined.dir = "auto";
      setText(refined, segment.refined);
    }
    this.element.setAttribute("aria-busy", "false"); // last: this is when a screen reader says it
  }
}

/** One channel of one call. */
class Card {
  constructor(session) {
    this.element = cloneOf("channel-template");
    this.parts = Object.fromEntries(
      ["party", "channel-id", "clock", "language", "state", "lines", "p50", "p95", "word-age"].map((name) => [name, this.element.querySelector(`.${name}`)]),
    );
    this.lines = new Map(); // by segment
    this.following = true;
    this.scrolledTo = 0;
    this.parts.lines.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.parts.lines;
      // The event comes late: lines may have come since. So only going back ends the following.
      if (scrollHeight - scrollTop - clientHeight < FOLLOW_PX) this.following = true;
      else if (scrollTop < this.scrolledTo) this.following = false;
      this.parts.lines.toggleAttribute("data-scrolled", scrollTop > 0);
    });
    this.update(session);
  }

  update(session) {
    this.session = session;
    const { parts } = this;
    this.element.dataset.state = session.state;
    this.element.dataset.channel = session.channel_id;
    const channel = `Channel ${session.channel_id}`;
    setText(parts.party, session.party || channel);
    setText(parts["channel-id"], session.party ? channel : "");
    setText(parts.language, session.language);
    setText(parts.state, { open: "Live", idle: "Quiet", closed: "Ended" }[session.state] ?? session.state);
    parts.state.title = session.reason;
    parts.lines.setAttribute("aria-label", session.party ? `${session.party}, ${channel}` : channel);
    if (session.language) parts.lines.lang = session.language;
    this.updateLatency(session.latency);
  }

  updateLatency(latency) {
    this.latency = latency;
    setLatency(this.parts.p50, latency.frame_p50_ms);
    setLatency(this.parts.p95, latency.frame_p95_ms);
  }

  /** Shows what only depends on the time. */
  tick(nowMs) {
    const { session, latency, parts } = this;
    const lengthMs = session.state === "closed" ? session.covered_ms : nowMs - session.started_us / 1_000;
    setText(parts.clock, session.started_us ? duration(lengthMs) : "");
    setText(parts["word-age"], latency.text_us && session.state !== "closed" ? `last word ${age(nowMs - latency.text_us / 1_000)}` : "");
  }

  showPartial(partial) {
    const line = this.lineOf(partial);
    if (!line.isFinal) line.showPartial(partial);
    follow(this);
  }

  showFinal(segment) {
    this.lineOf(segment).showFinal(segment);
    follow(this);
  }

  remove(segment) {
    this.lines.get(segment)?.element.remove();
    this.lines.delete(segment);
  }

  /** Drops open lines that are not open any more. */
  keepPartials(segments) {
    for (const [segment, line] of this.lines) if (!line.isFinal && !segments.has(segment)) this.remove(segment);
  }

  lineOf({ segment, start_ms: startMs }) {
    let line = this.lines.get(segment);
    if (!line) {
      line = new Line(startMs);
      this.lines.set(segment, line);
      const later = [...this.lines.values()].filter((other) => other.startMs > startMs).sort((one, other) => one.startMs - other.startMs)[0];
      this.parts.lines.insertBefore(line.element, later?.element ?? null);
      if (this.lines.size > LINES_KEPT) this.remove([...this.lines].sort(([, one], [, other]) => one.startMs - other.startMs)[0][0]);
    }
    return line;
  }

  scrollToNewest() {
    const { lines } = this.parts;
    const selection = document.getSelection();
    const isSelecting = !selection.isCollapsed && lines.contains(selection.anchorNode);
    if (!this.following || isSelecting) return;
    lines.scrollTop = lines.scrollHeight;
    this.scrolledTo = lines.scrollTop;
  }
}

/** Cards that got text since the last frame: scrolled together, after all nodes are written, so that layout is done once. */
const toFollow = new Set();
function follow(card) {
  if (toFollow.size === 0)
    requestAnimationFrame(() => {
      for (const each of toFollow) each.scrollToNewest();
      toFollow.clear();
    });
  toFollow.add(card);
}

/** The calls, each with its parties side by side; a channel shows its newest session. */
class Board {
  constructor() {
    this.element = byId("calls");
    this.cards = new Map(); // by session
    this.calls = new Map(); // by conversation
    this.superseded = new Set(); // sessions whose channel has a newer one
    this.offsetMs = 0; // the server's clock against ours
  }

  nowMs() {
    return Date.now() + this.offsetMs;
  }

  /** Returns the card of a session, or undefined where its channel has a newer one. */
  cardOf(session) {
    const known = this.cards.get(session.session_id);
    if (known) return known;
    if (this.superseded.has(session.session_id)) return undefined;
    const current = [...this.cards.values()].find((card) => card.session.channel_id === session.channel_id);
    if (current) {
      const isOlder = session.started_us && current.session.started_us > session.started_us;
      const past = isOlder ? session : current.session;
      this.superseded.add(past.session_id);
      if (isOlder) return undefined;
      this.remove(past.session_id);
    }
    const card = new Card(session);
    this.cards.set(session.session_id, card);
    this.place(card);
    return card;
  }

  /** Returns the card that a message is about; a session that was never announced gets a plain one. */
  cardFor({ session_id, channel_id, conversation_id }) {
    const latency = { frame_p50_ms: null, frame_p95_ms: null, text_ms: null, text_us: 0 };
    const plain = { party: "", state: "open", reason: "", language: "", direction: "unknown", started_us: 0, covered_ms: 0, latency };
    return this.cardOf({ session_id, channel_id, conversation_id, ...plain });
  }

  place(card) {
    const { conversation_id: conversation, direction } = card.session;
    let call = this.calls.get(conversation);
    if (!call) {
      call = { element: cloneOf("call-template"), cards: new Set() };
      this.calls.set(conversation, call);
      const name = call.element.querySelector(".call-name");
      setText(name, `Call ${conversation}`);
      name.title = conversation;
    }
    setText(call.element.querySelector(".call-direction"), direction === "unknown" ? "" : direction);
    call.cards.add(card);
    call.element.dataset.parties = call.cards.size;
    const place = (parent, element, next) => {
      if (element.parentNode !== parent || element.nextSibling !== next) parent.insertBefore(element, next);
    };
    const parties = call.element.querySelector(".parties");
    const laterParty = [...parties.children].find((other) => other !== card.element && inOrder(other.dataset.channel, card.session.channel_id) > 0);
    place(parties, card.element, laterParty ?? null);
    const first = (element) => element.querySelector(".channel").dataset.channel;
    const laterCall = [...this.element.children].find((other) => other !== call.element && inOrder(first(other), first(call.element)) > 0);
    place(this.element, call.element, laterCall ?? null);
    this.count();
  }

  remove(sessionId) {
    const card = this.cards.get(sessionId);
    if (!card) return;
    this.cards.delete(sessionId);
    const call = this.calls.get(card.session.conversation_id);
    call.cards.delete(card);
    card.element.remove();
    call.element.dataset.parties = call.cards.size;
    if (call.cards.size === 0) {
      call.element.remove();
      this.calls.delete(card.session.conversation_id);
    }
    this.count();
  }

  count() {
    const open = [...this.cards.values()].filter((card) => card.session.state !== "closed").length;
    setText(byId("open-channels"), String(open));
    byId("figures").hidden = this.cards.size === 0;
    byId("empty").hidden = this.cards.size > 0;
    this.element.dataset.density = this.cards.size <= 4 ? "few" : this.cards.size <= 16 ? "some" : "many";
    document.title = open ? `${open} live · Live captions` : "Live captions";
  }

  tick() {
    for (const card of this.cards.values()) card.tick(this.nowMs());
  }

  take(message) {
    if (message.server_us) this.offsetMs = message.server_us / 1_000 - Date.now();
    switch (message.type) {
      case "snapshot": {
        const shown = new Set(message.sessions.map(({ session }) => session.session_id));
        for (const sessionId of [...this.cards.keys()]) if (!shown.has(sessionId)) this.remove(sessionId);
        const oldestFirst = message.sessions.toSorted((one, other) => one.session.started_us - other.session.started_us);
        for (const { session, segments, partials } of oldestFirst) {
          const card = this.cardOf(session);
          if (!card) continue;
          card.update(session);
          card.keepPartials(new Set(partials.map(({ segment }) => segment)));
          segments.forEach((segment) => card.showFinal(segment));
          partials.forEach((partial) => card.showPartial(partial));
        }
        this.count();
        this.tick();
        break;
      }
      case "session": {
        const card = this.cardOf(message.session);
        if (card) {
          card.update(message.session);
          card.tick(this.nowMs());
        }
        this.count();
        break;
      }
      case "partial":
        this.cardFor(message)?.showPartial(message.partial);
        break;
      case "final":
      case "refined":
        this.cardFor(message)?.showFinal(message.segment);
        break;
      case "cancelled":
        this.cards.get(message.session_id)?.remove(message.segment);
        break;
      case "gone":
        this.superseded.delete(message.session_id);
        this.remove(message.session_id);
        break;
      case "latency":
        setLatency(byId("all-p50"), message.all.frame_p50_ms);
        setLatency(byId("all-p95"), message.all.frame_p95_ms);
        for (const [sessionId, latency] of Object.entries(message.sessions)) this.cards.get(sessionId)?.updateLatency(latency);
        this.tick();
        break;
    }
  }
}

/** Keeps a WebSocket open; after a break it goes on where it was. */
class Connection {
  constructor(take) {
    this.take = take;
    this.cursor = "";
    this.retryMs = RETRY_FIRST_MS;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.retryNow());
    this.open();
  }

  open() {
    const url = new URL("ws", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.search = location.search;
    if (this.cursor) url.searchParams.set("after", this.cursor);
    this.socket = new WebSocket(url);
    this.socket.onmessage = ({ data }) => this.hear(JSON.parse(data));
    this.socket.onclose = () => this.lose();
    this.watch();
  }

  hear(message) {
    this.retryMs = RETRY_FIRST_MS;
    this.say("live", "Connected");
    this.watch();
    if (message.cursor) this.cursor = message.cursor;
    this.take(message);
  }

  lose() {
    clearTimeout(this.silence);
    this.say("lost", "Reconnecting");
    const waitMs = this.retryMs * (0.75 + Math.random() / 2); // not all pages at once when a gateway comes back
    this.retryMs = Math.min(this.retryMs * 2, RETRY_MOST_MS);
    this.retry = setTimeout(() => this.open(), waitMs);
  }

  retryNow() {
    if (this.socket.readyState !== WebSocket.CLOSED) return;
    clearTimeout(this.retry);
    this.open();
  }

  /** Gives a connection up that has gone silent without being closed. */
  watch() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => {
      const { socket } = this;
      socket.onmessage = socket.onclose = null;
      socket.close();
      this.lose();
    }, SILENCE_MS);
  }

  say(state, text) {
    const element = byId("connection");
    if (element.dataset.state === state) return;
    element.dataset.state = state;
    setText(element, text);
    document.body.classList.toggle("stale", state === "lost");
    if (state === "live") board.count();
  }
}

const board = new Board();
setInterval(() => board.tick(), 1_000);
addEventListener("resize", () => board.cards.forEach(follow));
new Connection((message) => board.take(message));
