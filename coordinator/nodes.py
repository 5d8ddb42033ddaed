"""The tenants of the fair queue, and what of each can run where. Pure."""

from typing import Any

from coordinator.lanes import ANYWHERE, Lane

Path = tuple[str, ...]


class Node(Lane[Any]):
    """A tenant at some level, and its line at `ANYWHERE`: one object, since most have no other, and each object more is a miss
    of the cache more for every pop. Its lines at other places are of this class too, for the interpreter is fast where it meets
    one class only.

    At the bottom a line is a lane of entries. Above, it is a ring: of its children's lines at its place.
    """

    __slots__ = (
        "bottom",
        "children",
        "now",
        "others",
        "owed",
        "parent",
        "path",
        "position",
        "round",
        "spare",
        "tie",
        "weight",
    )

    def __init__(self, path: Path, weight: float, parent: "Node | None", position: int, overtaken_max: int) -> None:
        assert weight > 0, path
        super().__init__(self, ANYWHERE, overtaken_max)
        self.path, self.weight, self.parent, self.position = path, weight, parent, position
        self.tie = -position
        self.bottom = True
        self.round = 0.0
        """Of the parent's ring: when this node's turn comes."""
        self.owed = 0.0
        """Corrections not yet charged: they count with the next chunk."""
        self.now = 0.0
        """The round this node's own ring has come to."""
        self.others: dict[int, Node] | None = None
        """Its lines at other places, where it has something to run there."""
        self.spare: Node | None = None
        """The line at another place that ended last: tenants have one there again and again."""
        self.children: dict[str, Node] = {}

    @property
    def busy(self) -> bool:
        """Whether it has something to run somewhere."""
        return self.size > 0 or self.others is not None

    def before(self, other: "Node") -> bool:
        """Whether its turn comes before that of another child of the same ring."""
        return self.round < other.round or (self.round == other.round and self.position < other.position)

    # --- its lines ------------------------------------------------------------------------------------------------------

    def line(self, place: int) -> "Node | None":
        """None where it has nothing to run."""
        if place == ANYWHERE:
            return self if self.size else None
        return None if self.others is None else self.others.get(place)

    def lines(self) -> "list[Node]":
        own = [self] if self.size else []
        return own if self.others is None else [*own, *self.others.values()]

    def begin(self, place: int) -> "Node":
        """An empty line."""
        if place == ANYWHERE:
            return self
        if self.others is None:
            self.others = {}
        line, self.spare = self.spare, None
        if line is None:
            line = Node(self.path, self.weight, None, self.position, self.overtaken_max)
            line.node = self
        assert not line, "a line that ended and has something in it"
        line.place, line.bottom = place, self.bottom
        self.others[place] = line
        return line

    def end(self, place: int) -> None:
        if place != ANYWHERE:
            assert self.others is not None
            self.spare = self.others.pop(place)
            self.others = self.others or None

    # --- a ring: its size is how many lines it has --------------------------------------------------------------------

    def enter(self, line: "Node") -> None:
        due = line.due = line.node.round
        self.add(line, -due)

    def next_line(self) -> "Node | None":
        """Whose turn comes first, after putting outdated keys right; alone, one may stay as it is."""
        if not self:
            return None
        line: Node = self[-1]
        while line.due < line.node.round and self.size > 1:
            self.put_right(line)
            line = self[-1]
        return line

    def put_right(self, first: "Node") -> None:
        """The next one has had its turn: to where it belongs since."""
        self.pop()
        if self.later or not self:
            if not self:
                self.come_forward()
            self.enter(first)
            return
        due = -first.node.round  # as `enter` does it, without the calls: this runs for every chunk and level
        first.due = -due
        index = self.where(first, due)
        self.dues.insert(index, due)
        self.insert(index, first)
