"""What a visitor of the small sites finds there at first."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Review:
    author: str
    stars: int
    title: str
    text: str
    approved: bool = True


@dataclass
class Product:
    slug: str
    name: str
    sku: str
    cents: int
    category: str
    stock: int
    about: str
    reviews: list[Review] = field(default_factory=list)

    @property
    def price(self) -> str:
        return dollars(self.cents)


@dataclass
class Order:
    number: int
    customer: str
    day: str
    status: str
    lines: list[tuple[str, int]]
    """Slug of the product, and how many."""


@dataclass
class Comment:
    author: str
    text: str


@dataclass
class Post:
    number: int
    forum: str
    author: str
    title: str
    text: str
    votes: int
    voted: bool = False
    comments: list[Comment] = field(default_factory=list)


@dataclass
class Issue:
    number: int
    title: str
    text: str
    label: str
    author: str
    assignee: str = ""
    closed: bool = False


@dataclass
class Project:
    path: str
    """``owner/name``."""
    about: str
    stars: int
    files: dict[str, str]
    members: dict[str, str]
    """User -> role."""
    issues: list[Issue] = field(default_factory=list)
    starred: bool = False


@dataclass
class Data:
    """Everything on all sites."""

    products: dict[str, Product]
    orders: list[Order]
    cart: dict[str, int]
    wishes: list[str]
    forums: dict[str, str]
    """Name -> description."""
    posts: list[Post]
    bios: dict[str, str]
    projects: dict[str, Project]

    def total(self, order: Order) -> str:
        """What the order costs."""
        return dollars(sum(self.products[slug].cents * count for slug, count in order.lines))


def dollars(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def first_data() -> Data:
    """A fresh copy."""
    return Data(
        products={product.slug: product for product in _products()},
        orders=_orders(),
        cart={},
        wishes=[],
        forums={
            "gardening": "All that grows, indoors and out.",
            "cycling": "Two wheels and the roads they like.",
            "baking": "Bread, cakes and what went wrong.",
        },
        posts=_posts(),
        bios={"nora": "I like long walks.", "omar": "Baker since 2009."},
        projects={project.path: project for project in _projects()},
    )


def _products() -> list[Product]:
    return [
        Product(
            "amber-desk-lamp", "Amber Desk Lamp", "LAMP-01", 3495, "Lamps", 12, "A brass lamp with a warm light.",
            [
                Review("Petra", 5, "Lovely", "The light is warm and does not flicker."),
                Review("Quentin", 2, "Wobbly", "The foot is too light, it tips over."),
            ],
        ),
        Product("tall-floor-lamp", "Tall Floor Lamp", "LAMP-02", 8900, "Lamps", 4, "Reaches over any sofa."),
        Product("clip-on-reading-light", "Clip-On Reading Light", "LAMP-03", 1250, "Lamps", 40, "For books and beds."),
        Product(
            "blue-enamel-kettle", "Blue Enamel Kettle", "KITCHEN-01", 4275, "Kitchen", 7, "Two litres, whistles.",
            [
                Review("Rosa", 4, "Good", "Boils fast."),
                Review("Sven", 1, "Rust", "It began to rust after a month."),
                Review("Tilda", 2, "Rusty lid", "The lid shows rust already."),
            ],
        ),
        Product("oak-cutting-board", "Oak Cutting Board", "KITCHEN-02", 2650, "Kitchen", 15, "From one piece of oak."),
        Product("cast-iron-pan", "Cast Iron Pan", "KITCHEN-03", 3900, "Kitchen", 9, "Ready to use, 26 cm."),
        Product(
            "wool-blanket-grey", "Grey Wool Blanket", "HOME-01", 7400, "Bedroom", 3, "Woven of new wool.",
            [Review("Ugo", 5, "Warm", "Very warm.", approved=False)],
        ),
        Product(
            "linen-pillow-case", "Linen Pillow Case", "HOME-02", 1890, "Bedroom", 22, "Washed linen, 50 x 70 cm.",
            [Review("Vera", 3, "Creased", "Needs ironing.", approved=False)],
        ),
    ]  # fmt: skip


def _orders() -> list[Order]:
    return [
        Order(101, "emma", "2024-01-14", "Complete", [("oak-cutting-board", 1), ("cast-iron-pan", 1)]),
        Order(102, "felix", "2024-02-02", "Pending", [("amber-desk-lamp", 2)]),
        Order(103, "emma", "2024-03-09", "Processing", [("linen-pillow-case", 4), ("clip-on-reading-light", 1)]),
        Order(104, "greta", "2024-03-11", "Pending", [("wool-blanket-grey", 1)]),
    ]


def _posts() -> list[Post]:
    return [
        Post(1, "gardening", "omar", "Tomatoes on a north balcony?", "Do they ripen with three hours of sun?", 14,
             comments=[Comment("nora", "Only cherry tomatoes did for me."), Comment("ines", "Try peas.")]),
        Post(2, "gardening", "ines", "My compost smells", "What did I do wrong?", 31),
        Post(3, "gardening", "nora", "Swap seeds this spring", "I have beans and marigolds.", 8),
        Post(4, "cycling", "jonas", "Best lock for a city bike", "Mine was cut in a minute.", 22,
             comments=[Comment("omar", "Two locks of different kinds.")]),
        Post(5, "cycling", "ines", "Rain trousers that breathe", "Is there such a thing?", 17),
        Post(6, "baking", "omar", "Sourdough without a scale", "Spoons work better than you think.", 45),
        Post(7, "baking", "kaja", "Why do my scones not rise?", "Flat again.", 12),
    ]  # fmt: skip


def _projects() -> list[Project]:
    return [
        Project(
            "liam/tide-table", "Tide tables for small harbours", 12,
            {"README.md": "Tide table\nRun tides.py with the name of a harbour.", "LICENSE": "MIT License",
             "tides.py": "print('high water at noon')"},
            {"liam": "Owner", "mina": "Developer"},
            [
                Issue(1, "Wrong hour in winter", "All times are one hour off.", "bug", "mina"),
                Issue(2, "Add Norwegian harbours", "Please.", "feature", "nils"),
                Issue(3, "Crash on empty name", "It should ask again.", "bug", "nils"),
                Issue(4, "Typo in README", "habour", "docs", "mina", closed=True),
                Issue(5, "Moon phase is missing", "It was there in 0.2.", "bug", "olga", closed=True),
            ],
        ),
        Project(
            "liam/knit-chart", "Draws knitting charts from text", 48,
            {"README.md": "Knit chart\nOne letter is one stitch.", "LICENSE": "Apache License 2.0"},
            {"liam": "Owner", "olga": "Maintainer"},
            [Issue(1, "Support cables", "Two stitches that cross.", "feature", "olga")],
        ),
        Project(
            "mina/bird-songs", "Names a bird by its song", 230,
            {"README.md": "Bird songs\nNeeds a microphone.", "LICENSE": "MIT License"},
            {"mina": "Owner", "liam": "Developer"},
            [Issue(1, "Confuses blackbird and thrush", "Every morning.", "bug", "liam", assignee="mina")],
        ),
    ]  # fmt: skip
