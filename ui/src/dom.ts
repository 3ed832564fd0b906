// Build and change elements. Text from the mesh only ever becomes text: there is no innerHTML anywhere.

type Child = Node | string | null;
type Props = Record<string, string | number | boolean | ((event: any) => void)>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
  for (const child of children) if (child !== null) element.append(child);
  return element;
}

export function svg(tag: string, props: Record<string, string | number> = {}): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, String(value));
  return element;
}

export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no #${id} in the page`);
  return found as T;
}

export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Make the children of `list` those of `items`, in their order; elements of known keys are kept and updated. */
export function keyed<T>(
  list: HTMLElement,
  items: T[],
  key: (item: T) => string,
  make: (item: T) => HTMLElement,
  update: (element: HTMLElement, item: T) => void,
): void {
  const known = new Map<string, HTMLElement>();
  for (const element of Array.from(list.children) as HTMLElement[]) known.set(element.dataset.key ?? "", element);
  let place: Element | null = list.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = known.get(name);
    if (element) known.delete(name);
    else {
      element = make(item);
      element.dataset.key = name;
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
  }
  for (const element of known.values()) element.remove();
}
