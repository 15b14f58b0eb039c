// Drawings of thousands of boxes: a canvas that is drawn again, once a frame, when what it shows has changed.
import { html } from 'htm/preact';
import { useEffect, useRef } from 'preact/hooks';
import { theme } from './state.js';

const CSS = ['paper', 'paper-2', 'paper-3', 'ink', 'ink-2', 'ink-3', 'line', 'accent', 'outer', 'between', 'block', 'thread', 'other', 'launch', 'sans', 'bad'];
let colours = null, of = null;
export function palette() {
  if (of !== theme.value) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(CSS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    of = theme.value;
  }
  return colours;
}

// `draw(context, width, height)` draws in pixels of the page. `events` are listeners of the canvas.
export function Canvas({ draw, height, label, testid, events = {} }) {
  const ref = useRef(), current = useRef(), frame = useRef(0);
  current.current = { draw, height }; // the observer calls the first `paint`
  const paint = () => {
    frame.current = 0;
    const canvas = ref.current, width = canvas?.clientWidth, { draw, height } = current.current;
    if (!width) return;
    const ratio = devicePixelRatio || 1, context = canvas.getContext('2d');
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `10px ${palette().sans}`;
    draw(context, width, height);
  };
  const ask = () => (frame.current ||= requestAnimationFrame(paint));
  useEffect(() => {
    const observer = new ResizeObserver(ask);
    observer.observe(ref.current);
    const listened = Object.entries(events);
    for (const [name, listener] of listened) ref.current.addEventListener(name, listener, { passive: false });
    const { current: canvas } = ref;
    return () => {
      observer.disconnect();
      cancelAnimationFrame(frame.current);
      frame.current = 0;
      for (const [name, listener] of listened) canvas.removeEventListener(name, listener);
    };
  }, [events]);
  useEffect(() => void ask());
  return html`<canvas ref=${ref} class="drawing" style=${`height:${height}px`} role="img" aria-label=${label} data-testid=${testid} tabindex="0"></canvas>`;
}

export function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

// The text that fits into a width, by the width of a letter.
export const fit = (text, width) => text.slice(0, Math.max(0, Math.floor(width / 6.1)));
