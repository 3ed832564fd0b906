// The colours of the style sheet, for what is drawn.

export interface Palette {
  ink: string; muted: string; line: string; panel: string; raised: string; accent: string;
  good: string; warn: string; bad: string; prefill: string; decode: string; aggregated: string;
}

export function readPalette(): Palette {
  const style = getComputedStyle(document.documentElement);
  const found: Record<string, string> = {};
  const names = ["ink", "muted", "line", "panel", "raised", "accent", "good", "warn", "bad", "prefill", "decode", "aggregated"];
  for (const name of names) found[name] = style.getPropertyValue(`--${name}`).trim();
  return found as unknown as Palette;
}

/** A colour of the form #rrggbb with an opacity. */
export function faded(color: string, alpha: number): string {
  const value = Math.round(Math.max(0, Math.min(1, alpha)) * 255);
  return color + value.toString(16).padStart(2, "0");
}
