"""The shop, and the administration of its stock."""

from __future__ import annotations

from html import escape

from agentgym_rl.envs.webarena.sites.data import Data, Order, Product, Review, dollars
from agentgym_rl.envs.webarena.sites.pages import (
    Answer,
    Request,
    Site,
    choice,
    form,
    link,
    log_in_first,
    not_found,
    paragraph,
    table,
    text_area,
    text_field,
)

SHOP = Site(
    "SHOPPING",
    "One Stop Market",
    {"Home": "/", "Lamps": "/category/Lamps", "Kitchen": "/category/Kitchen", "Bedroom": "/category/Bedroom",
     "My Orders": "/orders", "Wish List": "/wishlist", "Cart": "/cart"},
    passwords={"emma": "emma-password"},
)  # fmt: skip

_ORDERINGS = {"name": lambda product: product.name, "price": lambda product: product.cents}


def _listed(products: list[Product]) -> str:
    return table(
        ("Product", "Price"), [(link(f"/{product.slug}.html", product.name), product.price) for product in products]
    )


@SHOP.get("/")
def home(data: Data, request: Request) -> Answer:
    search = form("/search", text_field("q", "Search the store"), "Search", method="get")
    return Answer("Home", search + _listed(list(data.products.values())))


@SHOP.get("/search")
def search(data: Data, request: Request) -> Answer:
    words = request.query.get("q", "").lower().split()
    found = [product for product in data.products.values() if all(word in product.name.lower() for word in words)]
    return Answer(f"Results for {request.query.get('q', '')}", _listed(found) if found else paragraph("No results."))


@SHOP.get(r"/category/(\w+)")
def category(data: Data, request: Request, name: str) -> Answer:
    order = request.query.get("order", "name")
    products = [product for product in data.products.values() if product.category == name]
    if not products or order not in _ORDERINGS:
        return not_found(request.path)
    sort = form(f"/category/{name}", choice("order", "Sort by", _ORDERINGS, order), "Sort", method="get")
    return Answer(name, sort + _listed(sorted(products, key=_ORDERINGS[order])))


@SHOP.get(r"/([a-z-]+)\.html")
def product_page(data: Data, request: Request, slug: str) -> Answer:
    product = data.products.get(slug)
    if product is None:
        return not_found(request.path)
    stars = choice("stars", "Stars", [str(number) for number in range(1, 6)])
    review = stars + text_field("title", "Summary") + text_area("text", "Review")
    return Answer(
        product.name,
        paragraph(product.about)
        + paragraph(f"Price: {product.price}", kind="price")
        + paragraph(f"SKU: {product.sku}")
        + form(f"/{slug}.html/cart", text_field("count", "Quantity", "1"), "Add to Cart")
        + form(f"/{slug}.html/wish", "", "Add to Wish List")
        + "<h2>Reviews</h2><div class='reviews'>"
        + "".join(_review(review) for review in product.reviews if review.approved)
        + "</div><h2>Write a review</h2>"
        + form(f"/{slug}.html/review", review, "Submit Review"),
    )


def _review(review: Review) -> str:
    return (
        f"<div class='review'><h3>{escape(review.title)}</h3><p class='author'>By {escape(review.author)}, "
        f"{review.stars} of 5 stars</p><p class='text'>{escape(review.text)}</p></div>"
    )


@SHOP.post(r"/([a-z-]+)\.html/(cart|wish|review)")
def change(data: Data, request: Request, slug: str, what: str) -> Answer:
    product, count = data.products.get(slug), request.form.get("count", "1")
    if product is None:
        return not_found(request.path)
    if request.user is None:
        return log_in_first()
    if what == "cart" and count.isdigit() and 0 < int(count) < 1000:
        data.cart[slug] = data.cart.get(slug, 0) + int(count)
        return Answer(location="/cart")
    if what == "wish":
        data.wishes = [*(wish for wish in data.wishes if wish != slug), slug]
        return Answer(location="/wishlist")
    if what == "review" and request.form.get("stars", "") in ("1", "2", "3", "4", "5"):
        title, text = request.form.get("title", ""), request.form.get("text", "")
        product.reviews.append(Review(request.user, int(request.form["stars"]), title, text))
    return Answer(location=f"/{slug}.html")


@SHOP.get("/cart")
def cart(data: Data, request: Request) -> Answer:
    if not data.cart:
        return Answer("Shopping Cart", paragraph("Your cart is empty."))
    rows = [
        (link(f"/{slug}.html", data.products[slug].name), str(count), dollars(count * data.products[slug].cents))
        for slug, count in data.cart.items()
    ]
    order = form("/orders", "", "Place Order")
    return Answer("Shopping Cart", f"<div class='cart'>{table(('Product', 'Quantity', 'Total'), rows)}</div>{order}")


@SHOP.get("/wishlist")
def wishes(data: Data, request: Request) -> Answer:
    listed = _listed([data.products[slug] for slug in data.wishes]) if data.wishes else paragraph("No items yet.")
    return Answer("Wish List", f"<div class='wishlist'>{listed}</div>")


@SHOP.post("/orders")
def place_order(data: Data, request: Request) -> Answer:
    if request.user is None or not data.cart:
        return log_in_first()
    number = max(order.number for order in data.orders) + 1
    data.orders.append(Order(number, request.user, "2024-04-01", "Pending", list(data.cart.items())))
    data.cart = {}
    return Answer(location=f"/orders/{number}")


@SHOP.get("/orders")
def orders(data: Data, request: Request) -> Answer:
    if request.user is None:
        return log_in_first()
    own = [order for order in reversed(data.orders) if order.customer == request.user]
    rows = [
        (link(f"/orders/{order.number}", f"Order {order.number}"), order.day, order.status, data.total(order))
        for order in own
    ]
    return Answer("My Orders", table(("Order", "Date", "Status", "Total"), rows))


@SHOP.get(r"/orders/(\d+)")
def order_page(data: Data, request: Request, number: str) -> Answer:
    found = [order for order in data.orders if order.number == int(number) and order.customer == request.user]
    return _order(data, found[0]) if found else not_found(request.path)


def _order(data: Data, order: Order) -> Answer:
    rows = [(escape(data.products[slug].name), str(count)) for slug, count in order.lines]
    return Answer(
        f"Order {order.number}",
        f"<p>Status: <span id='order_status'>{order.status}</span></p>"
        + paragraph(f"Date: {order.day}")
        + f"<div class='order-items'>{table(('Product', 'Quantity'), rows)}</div>"
        + paragraph(f"Total: {data.total(order)}"),
    )


# ------------------------------------------------------------------------------------------------------ administration

ADMIN = Site(
    "SHOPPING_ADMIN",
    "Market Administration",
    {"Dashboard": "/", "Orders": "/orders", "Products": "/products", "Reviews": "/reviews"},
    path="/admin",
    needs_login=True,
    passwords={"admin": "admin-password"},
)


@ADMIN.get("/")
def dashboard(data: Data, request: Request) -> Answer:
    pending = sum(order.status == "Pending" for order in data.orders)
    return Answer("Dashboard", paragraph(f"{len(data.orders)} orders, {pending} of them pending"))


@ADMIN.get("/orders")
def all_orders(data: Data, request: Request) -> Answer:
    rows = [
        (link(f"/admin/orders/{order.number}", f"Order {order.number}"), escape(order.customer), order.status)
        for order in data.orders
    ]
    return Answer("Orders", table(("Order", "Customer", "Status"), rows))


@ADMIN.get(r"/orders/(\d+)")
def one_order(data: Data, request: Request, number: str) -> Answer:
    order = next((order for order in data.orders if order.number == int(number)), None)
    if order is None:
        return not_found(request.path)
    page = _order(data, order)
    return Answer(page.title, page.body + form(f"/admin/orders/{number}/cancel", "", "Cancel Order"))


@ADMIN.post(r"/orders/(\d+)/cancel")
def cancel(data: Data, request: Request, number: str) -> Answer:
    for order in data.orders:
        if order.number == int(number):
            order.status = "Canceled"
    return Answer(location=f"/orders/{number}")


@ADMIN.get("/products")
def all_products(data: Data, request: Request) -> Answer:
    rows = [
        (link(f"/admin/products/{product.slug}", product.name), product.sku, product.price, str(product.stock))
        for product in data.products.values()
    ]
    return Answer("Products", table(("Product", "SKU", "Price", "Stock"), rows))


@ADMIN.get(r"/products/([a-z-]+)")
def edit_product(data: Data, request: Request, slug: str) -> Answer:
    product = data.products.get(slug)
    if product is None:
        return not_found(request.path)
    fields = text_field("price", "Price", f"{product.cents / 100:.2f}") + text_field(
        "stock", "Stock", str(product.stock)
    )
    saved = "<p role='status'>You saved the product.</p>" if "saved" in request.query else ""
    return Answer(product.name, saved + form(f"/admin/products/{slug}", fields, "Save"))


@ADMIN.post(r"/products/([a-z-]+)")
def save_product(data: Data, request: Request, slug: str) -> Answer:
    product, price, stock = data.products.get(slug), request.form.get("price", ""), request.form.get("stock", "")
    if product is None:
        return not_found(request.path)
    if not price.replace(".", "", 1).isdecimal() or not stock.isdecimal() or len(price + stock) > 20:
        return Answer(product.name, "<p role='alert'>Price and stock must be numbers.</p>", status=422)
    product.cents, product.stock = round(100 * float(price)), int(stock)
    return Answer(location=f"/products/{slug}?saved=1")


@ADMIN.get("/reviews")
def all_reviews(data: Data, request: Request) -> Answer:
    rows = [
        (
            escape(product.name),
            escape(review.author),
            escape(review.title),
            "Approved" if review.approved else "Pending",
            "" if review.approved else form(f"/admin/reviews/{product.slug}/{number}/approve", "", f"Approve {number}"),
        )
        for product in data.products.values()
        for number, review in enumerate(product.reviews)
    ]
    return Answer("Reviews", table(("Product", "Author", "Summary", "Status", "Action"), rows))


@ADMIN.post(r"/reviews/([a-z-]+)/(\d+)/approve")
def approve(data: Data, request: Request, slug: str, number: str) -> Answer:
    product = data.products.get(slug)
    if product is None or int(number) >= len(product.reviews):
        return not_found(request.path)
    product.reviews[int(number)].approved = True
    return Answer(location="/reviews")
