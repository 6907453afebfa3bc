"""Readers and writers of real CSV, XLSX, DOCX, PPTX and PDF files. The libraries are loaded when a tool first needs them."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

tables = Server("tables", "Reads and writes CSV and XLSX files.")
documents = Server("documents", "Reads and writes DOCX, PPTX and PDF files.")
Rows = list[list[str]]


def parsed(place: Place, file: str, ending: str, read: Callable[[Path, int], Any]) -> Any:
    """What `read` makes of a file with that ending, kept until the file changes. ToolError where it cannot be read."""
    path = place.path(file)
    if path.suffix != ending:
        raise ToolError(f"not a {ending[1:]} file")
    try:
        return read(path, path.stat().st_mtime_ns)
    except ToolError:
        raise
    except Exception as error:  # the libraries raise whatever a broken file brings about
        raise ToolError("the file cannot be read") from error


# CSV and XLSX ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def read_csv(path: Path, changed: int) -> Rows:
    """Rows of a CSV file, the first one its columns."""
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


@functools.lru_cache(1024)
def read_xlsx(path: Path, changed: int) -> dict[str, Rows]:
    """Sheet -> its rows as text."""
    from openpyxl import load_workbook

    book = load_workbook(path, read_only=True, data_only=True)
    try:
        return {
            sheet.title: [["" if value is None else str(value) for value in row] for row in sheet.iter_rows(values_only=True)]
            for sheet in book.worksheets
        }
    finally:
        book.close()


def csv_rows(place: Place, file: str) -> Rows:
    """Rows of a CSV file, at least one."""
    rows = parsed(place, file, ".csv", read_csv)
    if not rows:
        raise ToolError("the file is empty")
    return rows


def sheet_rows(place: Place, file: str, sheet: str) -> Rows:
    """Rows of a sheet. ToolError where there is no such sheet."""
    sheets = parsed(place, file, ".xlsx", read_xlsx)
    if sheet not in sheets:
        raise ToolError("no such sheet")
    return sheets[sheet]


def pick(rows: Rows, key: str, column: str) -> str:
    """The cell of the row that begins with `key`. ToolError where there is none."""
    if not rows or column not in rows[0]:
        raise ToolError("no such column")
    row = next((row for row in rows[1:] if row and row[0] == key), None)
    if row is None:
        raise ToolError("no such row")
    return row[rows[0].index(column)]


def as_text(rows: Rows) -> str:
    return "; ".join(" ".join(row) for row in rows)


def as_rows(text: str) -> Rows:
    return [row.split() for row in text.split(";")]


@tables.tool()
def columns(place: Place, file: str) -> str:
    """Columns of a CSV file."""
    return " ".join(csv_rows(place, file)[0])


@tables.tool()
def lookup(place: Place, file: str, key: str, column: str) -> str:
    """A cell of a CSV file, by the row's first word and the column."""
    return pick(csv_rows(place, file), key, column)


@tables.tool(cost=3)
def rows(place: Place, file: str) -> str:
    """A whole CSV file."""
    return as_text(csv_rows(place, file))


@tables.tool(cost=2)
def total(place: Place, file: str, column: str) -> str:
    """The sum of a column of numbers in a CSV file."""
    found = csv_rows(place, file)
    values = [pick(found, row[0], column) for row in found[1:]]
    if not all(value.isdigit() for value in values):
        raise ToolError("not a column of numbers")
    return str(sum(map(int, values)))


@tables.tool()
def csv_write(place: Place, file: str, text: str) -> str:
    """Writes a CSV file: rows parted by semicolons, cells by spaces."""
    if not file.endswith(".csv"):
        raise ToolError("not a csv file")
    out = io.StringIO()
    csv.writer(out).writerows(as_rows(text))
    place.write(file, out.getvalue().encode())
    return "written"


@tables.tool()
def sheets(place: Place, file: str) -> str:
    """Sheets of an XLSX file."""
    return " ".join(parsed(place, file, ".xlsx", read_xlsx))


@tables.tool(needs="tables.sheets")
def cell(place: Place, file: str, sheet: str, key: str) -> str:
    """The number of a row in a sheet of an XLSX file, by the row's first word."""
    found = sheet_rows(place, file, sheet)
    return pick(found, key, found[0][-1] if found else "")


@tables.tool(cost=3, needs="tables.sheets")
def sheet(place: Place, file: str, sheet: str) -> str:
    """A whole sheet of an XLSX file."""
    return as_text(sheet_rows(place, file, sheet))


@tables.tool()
def xlsx_write(place: Place, file: str, text: str) -> str:
    """Writes an XLSX file of one sheet: rows parted by semicolons, cells by spaces."""
    if not file.endswith(".xlsx"):
        raise ToolError("not a xlsx file")
    place.write(file, make_xlsx({"Sheet": as_rows(text)}))
    return "written"


def make_xlsx(sheets: dict[str, Rows]) -> bytes:
    """An XLSX file of these sheets; whole numbers become numbers."""
    from openpyxl import Workbook

    book = Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append([int(value) if value.isdigit() else value for value in row])
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


# DOCX, PPTX and PDF ----------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def read_docx(path: Path, changed: int) -> list[str]:
    """Paragraphs."""
    from docx import Document

    return [paragraph.text for paragraph in Document(str(path)).paragraphs if paragraph.text]


@functools.lru_cache(1024)
def read_pptx(path: Path, changed: int) -> list[str]:
    """Text of each slide."""
    from pptx import Presentation

    slides = Presentation(str(path)).slides
    return [" ".join(shape.text_frame.text for shape in slide.shapes if shape.has_text_frame) for slide in slides]


@functools.lru_cache(1024)
def read_pdf(path: Path, changed: int) -> list[str]:
    """Text of each page."""
    from pypdf import PdfReader

    return [page.extract_text().strip() for page in PdfReader(path).pages]


READERS: dict[str, Callable[[Path, int], list[str]]] = {".docx": read_docx, ".pptx": read_pptx, ".pdf": read_pdf}


def parts(place: Place, file: str, ending: str) -> list[str]:
    """Paragraphs, slides or pages of a file."""
    return parsed(place, file, ending, READERS[ending])


def holding(place: Place, file: str, ending: str, word: str) -> str:
    """The parts that hold a word."""
    return " ".join(part for part in parts(place, file, ending) if word in part.replace(".", "").split()) or "nothing found"


def numbered(place: Place, file: str, ending: str, number: int) -> str:
    """The part of that number, from 1. ToolError where there is none."""
    found = parts(place, file, ending)
    if not 1 <= number <= len(found):
        raise ToolError("no such part")
    return found[number - 1]


def write_document(place: Place, file: str, ending: str, text: str, make: Callable[[list[str]], bytes]) -> str:
    """Writes a file whose parts are parted by semicolons."""
    if not file.endswith(ending):
        raise ToolError(f"not a {ending[1:]} file")
    place.write(file, make([part.strip() for part in text.split(";")]))
    return "written"


@documents.tool()
def docx_find(place: Place, file: str, word: str) -> str:
    """Paragraphs of a DOCX file that hold a word."""
    return holding(place, file, ".docx", word)


@documents.tool(cost=3)
def docx_read(place: Place, file: str) -> str:
    """A whole DOCX file."""
    return " ".join(parts(place, file, ".docx"))


@documents.tool()
def docx_write(place: Place, file: str, text: str) -> str:
    """Writes a DOCX file: paragraphs parted by semicolons."""
    return write_document(place, file, ".docx", text, make_docx)


@documents.tool()
def pptx_find(place: Place, file: str, word: str) -> str:
    """Slides of a PPTX file that hold a word."""
    return holding(place, file, ".pptx", word)


@documents.tool()
def pptx_slide(place: Place, file: str, number: int) -> str:
    """One slide of a PPTX file, counted from 1."""
    return numbered(place, file, ".pptx", number)


@documents.tool()
def pptx_write(place: Place, file: str, text: str) -> str:
    """Writes a PPTX file: slides parted by semicolons."""
    return write_document(place, file, ".pptx", text, make_pptx)


@documents.tool()
def pdf_pages(place: Place, file: str) -> str:
    """How many pages a PDF file has."""
    return str(len(parts(place, file, ".pdf")))


@documents.tool()
def pdf_page(place: Place, file: str, number: int) -> str:
    """One page of a PDF file, counted from 1."""
    return numbered(place, file, ".pdf", number)


@documents.tool(needs="documents.pdf_pages")
def pdf_find(place: Place, file: str, word: str) -> str:
    """Pages of a PDF file that hold a word."""
    return holding(place, file, ".pdf", word)


@documents.tool()
def pdf_write(place: Place, file: str, text: str) -> str:
    """Writes a PDF file: pages parted by semicolons."""
    return write_document(place, file, ".pdf", text, make_pdf)


def make_docx(paragraphs: list[str]) -> bytes:
    """A DOCX file."""
    from docx import Document

    document, out = Document(), io.BytesIO()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    document.save(out)
    return out.getvalue()


def make_pptx(slides: list[str]) -> bytes:
    """A PPTX file, one text box per slide."""
    from pptx import Presentation
    from pptx.util import Inches

    deck, out = Presentation(), io.BytesIO()
    for text in slides:
        slide = deck.slides.add_slide(deck.slide_layouts[6])
        slide.shapes.add_textbox(Inches(1), Inches(1), Inches(8), Inches(1)).text_frame.text = text
    deck.save(out)
    return out.getvalue()


def make_pdf(pages: list[str]) -> bytes:
    """A PDF file, one line of Helvetica per page (PDF 32000-1, 7.5: header, objects, cross-reference table, trailer)."""
    count = len(pages)
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(count))
    font = 3 + 2 * count
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {count} >>"]
    for number, text in enumerate(pages):
        escaped = "".join(f"\\{char}" if char in "()\\" else char for char in text)
        stream = f"BT /F1 12 Tf 72 720 Td ({escaped}) Tj ET"
        resources = f"/Resources << /Font << /F1 {font} 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {resources} /Contents {4 + 2 * number} 0 R >>")
        objects.append(f"<< /Length {len(stream.encode('latin-1', 'replace'))} >>\nstream\n{stream}\nendstream")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1", "replace")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()
