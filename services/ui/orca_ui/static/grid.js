// The slot map's squares, of which all fit into a height that a page has for them, however many blocks there are.

const TALLEST = 132, WIDEST = 18, SMALLEST = 4; // pixels: of the map, and of a square's side

/**
 * The squares of a map of blocks in this width, in pixels: their side, how many are in a row, how many there are, and how
 * many blocks are in `each` of them. That is one, until a square of one block would be too small to be seen.
 */
export function grid(blocks, width) {
  for (let side = WIDEST; ; side -= 1) {
    const columns = Math.max(1, Math.floor(width / side));
    const room = columns * Math.floor(TALLEST / side);
    if (blocks > room && side > SMALLEST) continue;
    const each = Math.max(1, Math.ceil(blocks / room));
    const squares = Math.max(1, Math.ceil(blocks / each));
    return { side, columns, squares, each, height: Math.ceil(squares / columns) * side };
  }
}
